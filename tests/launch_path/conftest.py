"""The fake driver as a fixture, and a folder for what Triton compiles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_kernels import knobs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Sends the launches of a test to a driver of its own."""
    pytest.importorskip("triton", reason="needs triton")
    if knobs.TRITON_INTERPRET.get():
        pytest.skip("Triton's interpreter compiles nothing")
    from bench.gpu import fake_driver

    if "TRITON_CACHE_DIR" not in os.environ:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(ROOT / ".kernel_cache" / "triton"))
    with fake_driver.active() as active:
        yield active
