"""Triton compiles every selection kernel without a GPU, without float64 and without spills."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels import knobs

pytest.importorskip("triton", reason="needs triton")
if knobs.TRITON_INTERPRET.get():
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

from bench.gpu.ahead_of_time import select_ptx
from tests.ahead_of_time.ptx import widths
from tests.ahead_of_time.test_triton import TARGETS, cache, check
from tests.grids import grid

__all__ = ["cache"]


@grid(name=["count", "write"], dtype__sm=TARGETS, cover=1, most=1)
def test_search(name: str, dtype: torch.dtype, sm: int) -> None:
    ptx = select_ptx(name, dtype, sm)
    check(ptx)
    assert max(widths(ptx, "ld.global")) >= 128


@grid(cover=1, dtype__sm=TARGETS)
def test_place(dtype: torch.dtype, sm: int) -> None:
    check(select_ptx("place", dtype, sm))


@grid(cover=1, sm=[80, 90, 100])
def test_add(sm: int) -> None:
    check(select_ptx("place", torch.float32, sm, add=True))


@grid(sm=[80, 90, 100], n=["i32", "i64"], cover=1, most=1)
def test_permute(sm: int, n: str) -> None:
    check(select_ptx("permute", torch.float32, sm, n=n))


@grid(cover=1, name=["count", "write", "place"])
def test_vectors_beyond_2_to_31(name: str) -> None:
    check(select_ptx(name, torch.float32, 90, n="i64"))
