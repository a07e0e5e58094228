"""The example of `make train`, from the command line to the picture."""

import itertools
import json
import math
import os
import statistics
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from examples import image_data, report
from tests import limits

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples/train_images.py"


def run(*arguments: str | Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    # One thread a process. Several threads wait for each other in every operation, tens of times as long on a busy machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limits.seconds(timeout), check=False
    )


@pytest.fixture(scope="module")
def mnist() -> Path:
    pytest.importorskip("matplotlib")
    try:
        return image_data.locate("mnist")
    except image_data.DatasetError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_two_ranks_learn_with_both_algorithms(mnist: Path, tmp_path: Path) -> None:
    result = run("--nproc", "2", "--epochs", "2", "--output", tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("picture:") == 1  # rank 0 alone prints

    numbers = json.loads((tmp_path / "train.json").read_text())
    assert numbers["ranks"] == 2
    exact, compressed = numbers["runs"]
    assert (exact["algorithm"], compressed["algorithm"]) == ("allreduce", "bytegrad")
    for entry in numbers["runs"]:
        assert entry["steps"] == 2 * math.ceil(4000 / 2 / 32)
        assert 0.85 < entry["test_accuracy"] <= 1
        assert entry["loss"][0] == pytest.approx(math.log(10), abs=0.3)
        assert 0 <= entry["waiting_share"] <= 1
        assert entry["seconds"] == sorted(entry["seconds"])
        each = [after - before for before, after in itertools.pairwise([0.0, *entry["seconds"]])]
        assert entry["seconds_per_step"] == pytest.approx(statistics.median(each[report.Run.WARM_UP :]), abs=2e-6)
        assert entry["bytes_sent"] == sorted(entry["bytes_sent"])
    assert exact["loss"][0] == pytest.approx(compressed["loss"][0], abs=1e-6)  # the same start
    assert exact["compression_ratio"] == pytest.approx(1, rel=0.02)
    assert compressed["bytes_per_step"] <= 0.27 * exact["bytes_per_step"]
    assert abs(exact["test_accuracy"] - compressed["test_accuracy"]) < 0.03

    png = (tmp_path / "train.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    assert width > 1000
    assert height > 600


@pytest.mark.slow
def test_one_rank_sends_nothing(mnist: Path, tmp_path: Path) -> None:
    result = run("--nproc", "1", "--epochs", "1", "--output", tmp_path)
    assert result.returncode == 0, result.stderr
    exact, compressed = json.loads((tmp_path / "train.json").read_text())["runs"]
    assert exact["bytes_per_step"] == compressed["bytes_per_step"] == 0
    assert exact["loss"] == compressed["loss"]


@pytest.mark.slow
def test_algorithms_that_need_the_optimizer_or_bring_one(mnist: Path, tmp_path: Path) -> None:
    """The accuracy is that of the mean of all ranks, which the last line of each run shows."""
    algorithms = ["decentralized", "lowprec", "qadam:freeze_step=40"]
    result = run("--nproc", "3", "--epochs", "2", "--output", tmp_path, "--algorithm", *algorithms)
    assert result.returncode == 0, result.stderr
    mixed, encoded, adam = json.loads((tmp_path / "train.json").read_text())["runs"]
    assert all(entry["test_accuracy"] > 0.85 for entry in (mixed, encoded, adam))
    assert encoded["bytes_per_step"] < 0.6 * mixed["bytes_per_step"]  # to two neighbours instead of one
    assert adam["bytes_per_step"] < mixed["bytes_per_step"]  # compressed after the freeze; exact means send 4/3 of it


@pytest.mark.slow
def test_missing_data_is_one_message(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run("--data", tmp_path / "nowhere")
    assert result.returncode == 2
    assert f"{tmp_path / 'nowhere'} does not exist" in result.stderr
    assert "Traceback" not in result.stderr
