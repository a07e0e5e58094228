"""The order of a run: each worker begins with the items that compile kernels of its own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bagua_kernels.jit import _numba_cpu
from tests import kernels

FOUND = {
    f"tests/test_{file}.py::test_{name}": count
    for file, count in zip("abcd", (5, 4, 2, 1), strict=True)
    for name in range(2)
}
NAMES = [f"tests/test_{file}.py::test_{name}" for file in "xabcydz" for name in range(4)]


def test_a_file_has_one_worker_and_kernels_are_dealt_evenly() -> None:
    dealt = kernels.shares(FOUND, 2)
    assert sorted(name for share in dealt for name in share) == sorted(FOUND)
    files = [{kernels.file_of(name) for name in share} for share in dealt]
    assert not files[0] & files[1]
    assert [sum(FOUND[name] for name in share) for share in dealt] == [12, 12]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_worker_begins_with_its_share(workers: int) -> None:
    order = kernels.first(NAMES, FOUND, workers)
    assert sorted(order) == list(range(len(NAMES)))
    named = [NAMES[place] for place in order]
    begin = 0
    for worker, share in enumerate(kernels.shares(FOUND, workers)):
        assert named[begin : begin + len(share)] == share
        begin += (len(NAMES) - begin) // (workers - worker)
    others = [name for name in named if name not in FOUND]
    assert others == [name for name in NAMES if name not in FOUND]


def test_items_that_a_run_lacks_are_passed_over() -> None:
    assert kernels.first(["tests/test_a.py::test_1", "tests/test_q.py::test_1"], FOUND, 2) == [0, 1]
    assert kernels.first([], FOUND, 2) == []


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "kernels.txt"
    assert kernels.read(path) == {}
    kernels.write({"tests/test_a.py::test_1[x y]": 2, "tests/test_b.py::test_2": 0}, path)
    assert kernels.read(path) == {"tests/test_a.py::test_1[x y]": 2}


def product(values):
    return values[0] * factor


factor = 1.0


def test_first_needs_are_counted() -> None:
    found = Counter[str]()
    kernel = _numba_cpu.compile_template(product, {"factor": np.float32(3)})
    with kernels.counting(found, "first"):
        assert kernel(np.ones(1, np.float32)) == 3
    with kernels.counting(found, "second"):
        assert kernel(np.ones(2, np.float32)) == 3
        assert kernel(np.ones(1, np.float64)) == 3
    assert found == {"first": 1, "second": 1}


def test_the_list_names_files_of_this_tree() -> None:
    root = Path(__file__).parents[1]
    missing = {kernels.file_of(name) for name in kernels.read() if not (root / kernels.file_of(name)).exists()}
    assert not missing, "run python -m pytest tests -n 0 --record-kernels"
