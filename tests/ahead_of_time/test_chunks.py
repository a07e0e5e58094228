"""Triton compiles the kernels of chunked top-k without a GPU: without float64, contraction and spills."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels import knobs

pytest.importorskip("triton", reason="needs triton")
if knobs.TRITON_INTERPRET.get():
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

from bagua_kernels.launchers.chunks import Record
from bench.gpu.ahead_of_time import chunks_ptx
from tests.ahead_of_time.ptx import widths
from tests.ahead_of_time.test_triton import TARGETS, cache, check
from tests.grids import grid, only

__all__ = ["cache"]

WHOLE = Record(64, 4096)
SOURCES = only([(False, False), (True, False), (True, True)], (True, True))


@pytest.mark.slow
@grid(residual__start=SOURCES, dtype__sm=TARGETS, cover=1, most=1)
def test_encode(residual: bool, start: bool, dtype: torch.dtype, sm: int) -> None:
    ptx = chunks_ptx("encode", WHOLE, dtype, sm, residual=residual, start=start)
    check(ptx)
    assert max(widths(ptx, "ld.global")) >= 64


@grid(
    record=only([WHOLE, Record(1, 32), Record(4096, 4096)], WHOLE), counted=only([False, True], True), cover=1, most=1
)
def test_add(record: Record, counted: bool) -> None:
    check(chunks_ptx("add", record, torch.float32, 90, counted=counted))
