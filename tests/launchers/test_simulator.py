"""Simulated threads of a block wait for each other, and an error of one is the block's."""

from __future__ import annotations

import numpy as np
import pytest

from bagua_kernels import knobs
from tests.conftest import Target

if not knobs.CUDA_SIMULATOR.get():
    pytest.skip("needs Numba's CUDA simulator: NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from numba import cuda


def test_threads_meet_at_barriers(target: Target) -> None:
    @cuda.jit
    def shift(x, rounds):
        place = cuda.threadIdx.x
        for _ in range(rounds):
            value = x[(place + 1) % cuda.blockDim.x]
            cuda.syncthreads()
            x[place] = value
            cuda.syncthreads()

    x = np.arange(64)
    shift[1, 64](x, 10)
    assert np.array_equal(x, np.roll(np.arange(64), -10))


def test_threads_that_have_ended_are_not_waited_for(target: Target) -> None:
    @cuda.jit
    def half(x):
        if cuda.threadIdx.x < 8:
            return
        cuda.syncthreads()
        x[cuda.threadIdx.x] = 1

    x = np.zeros(16)
    half[1, 16](x)
    assert x.tolist() == [0] * 8 + [1] * 8


def test_the_error_of_a_thread_is_the_blocks(target: Target) -> None:
    @cuda.jit
    def fails(x):
        if cuda.threadIdx.x == 5:
            raise ValueError("five")
        cuda.syncthreads()

    with pytest.raises(ValueError, match=r"tid=\[5, 0, 0\].*five"):
        fails[1, 8](np.zeros(8))
