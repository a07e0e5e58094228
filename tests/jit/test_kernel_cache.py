"""Compiled kernels on disk: whatever happens to their files, kernels run, and later starts find them."""

import fcntl
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from bagua_kernels import knobs
from bagua_kernels.jit import _numba_cpu, compiling

ROOT = Path(__file__).parents[2]

# What a start does: takes a kernel from disk or compiles it; prints whether it was found there, and its result.
PROGRAM = """
import json, sys
import numpy as np
from tests.jit import test_kernel_cache as cases
kernel = cases.doubling()
print("ready", flush=True)
sys.stdin.readline()
result = kernel(np.arange(4.0, dtype=np.float32))
print(json.dumps([sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()), float(result)]))
"""


def doubled_sum(values):
    total = np.float32(0)
    for value in values:
        total += value * factor
    return total


factor = 1.0


def doubling() -> Any:
    """A new dispatcher each time, as after a new start."""
    _numba_cpu._templates.clear()
    return _numba_cpu.compile_template(doubled_sum, {"factor": np.float32(2)})


def run(kernel: Any) -> tuple[int, float]:
    """How many signatures came from disk, and the result."""
    result = kernel(np.arange(4.0, dtype=np.float32))
    return sum(kernel.stats.cache_hits.values()), float(result)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def entry(folder: Path) -> Path:
    (path,) = folder.rglob("*.nbc")
    return path


def test_second_start_finds_what_the_first_has_compiled(folder: Path) -> None:
    assert run(doubling()) == (0, 12.0)
    assert run(doubling()) == (1, 12.0)


def test_signatures_have_files_of_their_own(folder: Path) -> None:
    doubling()(np.ones(2, np.float32))
    assert doubling()(np.ones(2, np.float64)) == 4.0
    assert len(list(folder.rglob("*.nbc"))) == 2
    assert run(doubling()) == (1, 12.0)


def damaged(content: bytes, how: str) -> bytes:
    middle = len(content) // 2
    return {
        "empty": b"",
        "cut off": content[:middle],
        "one bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "longer": content + b"\0",
        "text": b"nothing of the kind",
    }[how]


@pytest.mark.parametrize("how", ["empty", "cut off", "one bit", "longer", "text"])
def test_damaged_entry_is_compiled_anew_and_replaced(folder: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    run(doubling())
    path = entry(folder)
    sound = path.read_bytes()
    path.write_bytes(damaged(sound, how))
    assert run(doubling()) == (0, 12.0)
    assert "compiled anew and replaced" in caplog.text
    assert entry(folder) == path
    caplog.clear()
    assert run(doubling()) == (1, 12.0)
    assert caplog.text == ""


def test_folder_in_place_of_an_entry_does_not_end_training(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(doubling())
    path = entry(folder)
    path.unlink()
    path.mkdir()
    assert run(doubling()) == (0, 12.0)
    assert "could not be saved" in caplog.text


@pytest.mark.slow
def test_full_disk_is_a_warning(tmp_path: Path) -> None:
    program = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    ) + PROGRAM
    result = started(program, tmp_path)
    output, errors = result.communicate("\n", timeout=100)
    assert result.returncode == 0, errors
    assert json.loads(output.splitlines()[1]) == [0, 1, 12.0]
    assert "could not be saved" in errors


def started(program: str, folder: Path) -> Any:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT), "PATH": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_of_processes_that_start_together_one_compiles(tmp_path: Path) -> None:
    processes = [started(PROGRAM, tmp_path) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    outputs = [process.communicate("\n", timeout=100) for process in processes]
    results = [json.loads(output) for output, _ in outputs]
    assert [result for _, _, result in results] == [12.0] * 3
    assert sum(hits for hits, _, _ in results) == 2, outputs


def test_failed_compilation_leaves_the_lock_and_the_clock(folder: Path) -> None:
    kernel = doubling()
    with pytest.raises(numba.core.errors.TypingError):
        kernel("no array of numbers")
    (path,) = folder.rglob("*.lock")
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    before = compiling.seconds()
    assert compiling.seconds() == before


def test_seconds_of_compiling_are_counted_once(folder: Path) -> None:
    before = compiling.seconds()
    run(doubling())
    taken = compiling.seconds() - before
    assert taken > 0
    run(doubling())
    assert compiling.seconds() == before + taken


@pytest.mark.parametrize(("rank", "lines"), [(None, 1), (0, 1), (1, 0)])
def test_rank_0_says_that_it_compiles(
    folder: Path, rank: int | None, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling, "_clock", compiling._Clock())
    monkeypatch.setattr(compiling, "_AFTER", 0.0)
    with knobs.override(knobs.RANK, rank), caplog.at_level(logging.WARNING):
        doubling()(np.ones(2, np.float32))
        doubling()(np.ones(2, np.float64))
    said = [record.getMessage() for record in caplog.records if "compiling kernels" in record.getMessage()]
    assert len(said) == lines
    assert all(str(folder) in line for line in said)


def test_clock_stands_still_while_kernels_are_compiled() -> None:
    before = compiling.clock()
    compiling.begin("folder")
    first = compiling.clock()
    compiling.begin("folder")  # a kernel that the first one calls
    compiling.end()
    assert compiling.clock() == first
    compiling.end()
    assert before <= first <= compiling.clock()


# Compiles one kernel of PowerSGD and one of an optimizer, and prints the name of one that PowerSGD would compile.
TWO_KERNELS = """
import numpy as np, torch
from bagua_kernels.jit._numba_cpu import VOCABULARY
from bagua_kernels.launchers import elementwise, low_rank
from bagua_kernels.rules.optimizers import ElementwiseRule

def negated(x):
    return -x

elementwise.apply(ElementwiseRule("negated", negated, 1, (0,)), [torch.ones(4)], [])
low_rank.orthonormalize(torch.ones(1, 4, 2))
print(VOCABULARY, low_rank.OP.backend(torch.device("cpu")).kernels((1,)).project.__name__)
"""


@pytest.mark.slow
def test_a_change_of_powersgd_leaves_other_kernels_in_the_cache(tmp_path: Path) -> None:
    copy, cache = tmp_path / "copy", tmp_path / "cache"
    skipped = shutil.ignore_patterns("__pycache__", "comm", "algorithms")
    shutil.copytree(ROOT / "bagua_kernels", copy / "bagua_kernels", ignore=skipped)

    def compiled() -> tuple[list[str], dict[bool, set[tuple[Path, int]]]]:
        """What was printed, and the entries with their times: those of PowerSGD, and the others."""
        environment = {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(copy), "PATH": ""}
        command = [sys.executable, "-c", TWO_KERNELS]
        result = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert result.returncode == 0, result.stderr
        entries: dict[bool, set[tuple[Path, int]]] = {False: set(), True: set()}
        for path in cache.rglob("*.nbc"):
            entries[path.parent.name.startswith("low_rank_")].add((path, path.stat().st_mtime_ns))
        return result.stdout.split(), entries

    (vocabulary, project), before = compiled()
    assert before[True]
    assert before[False]
    assert compiled() == ([vocabulary, project], before)
    for file in (copy / "bagua_kernels/launchers/low_rank").glob("*.py"):
        file.write_text(file.read_text() + "\nCHANGED = True\n")
    (same_vocabulary, other_project), after = compiled()
    assert after[False] == before[False]
    assert not after[True] & before[True]
    assert same_vocabulary == vocabulary
    assert other_project != project
