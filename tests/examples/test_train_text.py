"""The example of slow lines, from the command line to the picture."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.netlab.lab import available
from tests import limits

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples/train_text.py"
SMALL = ("--steps", "60", "--width", "32", "--layers", "1", "--evaluations", "2")


def run(
    *arguments: str | Path, timeout: float = 300, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    # One thread a process. Several threads wait for each other in every operation, tens of times as long on a busy machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    limit = limits.seconds(timeout)
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit, check=False
    )


def runs(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "train_text.json").read_text())["runs"]
    return found


@pytest.mark.slow
def test_two_ranks_learn_with_every_algorithm(tmp_path: Path) -> None:
    algorithms = ["ddp", "local_sgd", "diloco", "sparse_loco"]
    result = run(*SMALL, "--output", tmp_path, "--patience", "1000", "--algorithm", *algorithms)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("picture:") == 1  # rank 0 alone prints
    assert "line: no limit" in result.stdout
    exact, plain, outer, sparse = found = runs(tmp_path)
    assert [one["algorithm"] for one in found] == algorithms
    for one in found:
        assert (one["steps"], len(one["validation"]), one["measured_steps"]) == (60, 2, None)
        assert one["loss"][0] == pytest.approx(math.log(128), abs=0.5)
        assert one["loss"][0] == found[0]["loss"][0]  # the same start and the same data
        assert one["validation_loss"] < 3.5
        assert one["seconds"] == sorted(one["seconds"])
    # Two rounds in 60 steps, in which ranks send what gradients take in two steps.
    assert plain["bytes_per_step"] == pytest.approx(exact["bytes_per_step"] / 30, rel=0.05)
    assert outer["bytes_per_step"] == pytest.approx(plain["bytes_per_step"], rel=0.01)
    assert sparse["bytes_per_step"] < 0.5 * outer["bytes_per_step"]  # biases and norms go as they are


@pytest.mark.slow
def test_impatience_extrapolates_from_a_few_steps(tmp_path: Path) -> None:
    result = run(*SMALL, "--output", tmp_path, "--patience", "0", "--algorithm", "ddp")
    assert result.returncode == 0, result.stderr
    assert "extrapolated from 6 measured steps" in result.stdout
    (one,) = runs(tmp_path)
    assert (one["steps"], one["measured_steps"]) == (60, 6)
    assert one["validation_loss"] < 3.5
    assert one["seconds"][59] == pytest.approx(60 * one["seconds"][0], rel=1e-3)


@pytest.mark.slow
def test_hosts_with_a_slow_line(tmp_path: Path) -> None:
    """Where hosts can be emulated, each has its line's limit; elsewhere the program prints why they cannot."""
    # What the kernel is told of the lines: bytes then take their time, since hosts have no other way to one another.
    program = tmp_path / "programs" / "tc"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> "{tmp_path}/tc"\nexec {shutil.which("tc")} "$@"\n')
    program.chmod(0o755)
    path = {"PATH": os.pathsep.join([str(program.parent), os.environ["PATH"]])}
    arguments = (*SMALL, "--output", tmp_path, "--rate", "10", "--algorithm", "ddp", "diloco")
    result = run(*arguments, variables=path)
    assert result.returncode == 0, result.stderr
    exact, outer = runs(tmp_path)
    if reason := available(delay=False):
        assert reason in result.stdout
        assert "training with processes on this machine instead" in result.stdout
        assert "line: no limit" in result.stdout
        return
    assert "2 emulated hosts" in result.stdout
    assert "line: 10 Mbit/s" in result.stdout
    assert outer["bytes_per_step"] == pytest.approx(exact["bytes_per_step"] / 30, rel=0.05)
    shapes = [line.split() for line in (tmp_path / "tc").read_text().splitlines() if " replace " in line]
    # The last lab is that of the training. Each line is limited at both of its ends.
    ends = {(words[words.index("-n") + 1].rsplit("-", 1)[1], words[words.index("dev") + 1]): words for words in shapes}
    assert sorted(ends) == [("h0", "eth0"), ("h1", "eth0"), ("switch", "p0"), ("switch", "p1")]
    assert all(words[words.index("rate") + 1] == "10000000bit" for words in ends.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--data", "nowhere"), "nowhere cannot be read"), (("--steps", "0"), "steps, evaluations and nproc must be 1")],
)
def test_wrong_arguments_are_one_message(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
