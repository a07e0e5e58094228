"""`pytest bench`, as users run the kernel suites."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import limits

ROOT = Path(__file__).parents[2]
SMALL = ("--codec-elements", "3000", "--adamw-elements", "3000", "--rounds", "2")


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    # pytest-benchmark measures nothing in a worker of pytest-xdist, which it knows by this variable.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=limits.seconds(110), check=False, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_folder_holds_all_suites() -> None:
    names = run("bench", "--collect-only", "-q")
    assert "bench/bench_codecs.py::test_codec[encode, 8 bits-AbsMaxInt8 numba_cpu]" in names
    assert "bench/bench_elementwise.py::test_elementwise[copy_]" in names


@pytest.mark.slow
def test_one_file_is_measured_and_shown_as_a_table(tmp_path: Path) -> None:
    output = run("bench/bench_elementwise.py", *SMALL, "--benchmark-json", str(tmp_path / "out.json"))
    assert "AdamW: 3,000 elements" in output
    lines = [line.split() for line in output.splitlines()]
    assert ["what", "by", "median", "ms", "GB/s", "of", "copy"] in lines
    (copy,) = [line for line in lines if line[:1] == ["copy_"]]
    assert copy[-1] == "100%"
    assert float(copy[1]) > 0
    assert max(map(len, output[output.index("AdamW: 3,000") :].splitlines())) <= 80
    measured = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert {one["group"] for one in measured} == {"AdamW"}
    assert all(one["stats"]["rounds"] == 2 for one in measured)


@pytest.mark.slow
def test_benchmarks_stay_off_where_that_is_asked_for() -> None:
    assert "GB/s" not in run("bench/bench_elementwise.py", *SMALL, "--benchmark-disable")


@pytest.mark.slow
def test_every_row_runs() -> None:
    output = run("bench", *SMALL)
    assert output.count(": 3,000 elements") >= 15
    assert "quantize_per_channel" in output
