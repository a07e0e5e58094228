"""Numba-CUDA compiles kernels beside a NumPy without the names that it asks for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import limits

pytest.importorskip("numba_cuda", reason="needs numba_cuda")

# What NumPy 2.5 is to numba-cuda: one without `row_stack`.
PROGRAM = """
import warnings
import numpy as np
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    if hasattr(np, "row_stack"):
        del np.row_stack
from bagua_kernels.jit._numba_cuda_package import cuda
from numba.cuda import types

def double(x):
    i = cuda.grid(1)
    if i < x.size:
        x[i] = x[i] * 2

assert not hasattr(np, "row_stack"), "NumPy was left changed"
ptx, _ = cuda.compile_ptx(double, (types.float32[::1],), cc=(9, 0))
assert ".entry" in ptx
"""


def test_a_kernel_is_compiled_without_row_stack() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=limits.seconds(100),
        check=False,
    )
    assert done.returncode == 0, done.stderr
