"""The formulas of memory on the pages of algorithms, and what the benchmark makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.memory import pages
from bench.memory.measure import PAGES, SPECS, expected, measure
from tests.grids import grid

SCALE = 0.0645  # 8 M parameters


@grid(name=sorted(PAGES))
def test_pages_have_formulas(name: str) -> None:
    assert name in SPECS
    row = {"parameters": 124_000_000, "largest": 38_000_000}
    found = expected(name, row)
    assert found is not None
    # Exact and 8-bit means keep no vector of all parameters.
    least = 38e6 if name in ("allreduce", "bytegrad") else 124e6
    assert 4 * least <= found[0] <= 24 * 124e6
    assert found[1] == pytest.approx(0.05 * found[0] + 100e6)


def test_formulas_are_sums_and_products() -> None:
    assert pages.value("8 N + 4 B / 2 - 1", {"N": 3, "B": 5}) == 33.0
    with pytest.raises(ValueError, match="sums and products"):
        pages.value("N ** 2", {"N": 3})
    with pytest.raises(ValueError, match="sums and products"):
        pages.value("8 M", {"N": 3})


@pytest.fixture(scope="module")
def plain() -> int:
    """Bytes of the plain loop's peak."""
    return int(measure("plain", SCALE)["training"])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not count a process's peak")
@grid(name=sorted(PAGES))
def test_formulas_hold_for_a_small_model(name: str, plain: int) -> None:
    row = measure(SPECS[name], SCALE)
    found = expected(name, row)
    assert found is not None
    formula, allowed = found
    assert row["training"] - plain <= formula + allowed, row
