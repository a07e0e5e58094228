"""Values that differ from call to call compile no kernel again."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels import knobs

pytest.importorskip("triton", reason="needs triton")
if knobs.TRITON_INTERPRET.get():
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

from bagua_kernels.compression import QSGD, ChunkedTopK, MinMaxUInt8
from bagua_kernels.launchers import elementwise, select
from bagua_kernels.rules.optimizers import ADAM
from tests.launch_path.calls import ENTRIES, Shape, chunk_ends, scalars

# Triton has special kernels for 1 and for multiples of 16, and other types for integers beyond 32 bits.
SEEDS = (0, 1, 16, 17, (1 << 31) - 1, 1 << 31, (1 << 32) + 1, (1 << 63) + 16, (1 << 64) - 1)
FACTORS = (0.5, 1.0, 0.0, 16.0, 1e-30)
SHAPE = Shape()


def test_seeds(driver):
    codec = QSGD()
    payloads = SHAPE.payloads(codec)
    for seed in SEEDS:
        codec.encode(SHAPE.vector(), seed=seed, out=payloads[0])
        codec.reduce(payloads, SHAPE.n, seed=seed, out=payloads[0])
    assert driver.compilations == 2
    assert len(driver.launches) == 2 * len(SEEDS)


def test_factors(driver):
    codec = MinMaxUInt8()
    payloads = SHAPE.payloads(codec)
    for factor in FACTORS:
        codec.decode_sum(payloads, SHAPE.vector(), scale=factor)
        codec.encode_feedback(SHAPE.vector(), SHAPE.vector(), factor=factor, out=payloads[0])
        elementwise.apply(ADAM, [SHAPE.vector() for _ in range(ADAM.arrays)], [factor] * scalars(ADAM))
    assert driver.compilations == 3


def test_divisors_and_ranks(driver):
    codec = MinMaxUInt8()
    for ranks in (2, 3, 5, 7):
        shape = Shape(ranks=ranks)
        codec.decode_sum(shape.payloads(codec), shape.vector(), weights=[1 / ranks] * ranks)
    assert driver.compilations == 1


def test_lengths(driver):
    codec = MinMaxUInt8()
    for n in (1009, 1013, 999, 5001):
        shape = Shape(n=n)
        codec.encode(shape.vector(), out=shape.payloads(codec)[0])
    assert driver.compilations == 1
    for n in (1, 16, 1024):
        shape = Shape(n=n)
        codec.encode(shape.vector(), out=shape.payloads(codec)[0])
    assert driver.compilations == 3, "expected a kernel for 1, one for multiples of 16 and one for the rest"


def test_lengths_of_chunks(driver):
    codec = ChunkedTopK()
    for n in (1, 16, 1009, 4096, 5000):
        shape = Shape(n=n)
        codec.encode(shape.vector(), out=shape.payloads(codec)[0])
    assert driver.compilations == 1


def test_thresholds_and_capacities(driver):
    for threshold in (0, 1, 16, 17, select.INFINITE):
        select.Collected(SHAPE.vector(), threshold)
    assert driver.compilations == 1
    for capacity in (1, 16, ENTRIES):
        entries = (SHAPE.vector(torch.int16, capacity), SHAPE.vector(n=capacity))
        select.place(chunk_ends(SHAPE), *entries, SHAPE.vector())
    assert driver.compilations == 2
    for n, count in ((1, 1), (16, 16), (1009, 100)):
        select.permuted(n, count, 5, torch.device("cpu"))
    assert driver.compilations == 3
