"""ChunkedTopK where a chunk has little in common with the one before it, whose threshold a kernel may begin with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from bagua_kernels.compression import ChunkedTopK
from tests.conftest import EMULATED, Target
from tests.grids import folded, grid
from tests.oracles import chunked as oracle
from tests.oracles.vectors import F32, make, same_bits

Chunk = Callable[[int, int], F32]
FEW = 3

CODECS = [ChunkedTopK(k=5, chunk=32), ChunkedTopK(k=20, chunk=64), ChunkedTopK(k=16, chunk=256)]
CODECS += [] if EMULATED else [ChunkedTopK(k=64, chunk=4096), ChunkedTopK(k=4096, chunk=4096)]


def scaled(kind: str, scale: float) -> Chunk:
    return lambda size, seed: make(kind, size, scale, seed)


def sparse(size: int, seed: int) -> F32:
    """Fewer elements than are kept are not zero."""
    x = np.zeros(size, np.float32)
    x[np.random.default_rng(seed).permutation(size)[:FEW]] = 0.5, -0.5, 1e-20
    return x


def steps(size: int, seed: int) -> F32:
    """Few values, each of them many times."""
    return np.random.default_rng(seed).integers(-2, 3, size).astype(np.float32)


def infinite(size: int, seed: int) -> F32:
    x = make("gaussian", size, 1.0, seed)
    x[seed % size :: 3] = np.inf
    return x


def neighbours(size: int, seed: int) -> F32:
    """All keys differ, by one."""
    bits = 0x3F80_0000 + np.random.default_rng(seed).permutation(size)
    return bits.astype(np.uint32).view(np.float32)


CHUNKS: dict[str, Chunk] = {
    "ones": scaled("gaussian", 1.0),
    "tiny": scaled("gaussian", 1e-42),
    "huge": scaled("heavy", 1e33),
    "zeros": lambda size, seed: np.zeros(size, np.float32),
    "sparse": sparse,
    "steps": steps,
    "infinite": infinite,
    "neighbours": neighbours,
}


def vector(codec: ChunkedTopK, names: list[str]) -> F32:
    return np.concatenate([CHUNKS[name](codec.chunk, seed) for seed, name in enumerate(names)])


def check(target: Target, codec: ChunkedTopK, x: F32) -> None:
    """Compares what both passes make with the oracle."""
    k, chunk = codec.k, codec.chunk
    expected = oracle.encode(x, k, chunk)
    there = torch.from_numpy(x.copy()).to(target.device)
    assert np.array_equal(codec.encode(there).cpu().numpy(), expected)
    before = make("gaussian", x.size, 1e-3, 1)
    expected, lost = oracle.outer(x, np.zeros_like(x), before, 0.5, k, chunk)
    residual = torch.from_numpy(before.copy()).to(target.device)
    payload = codec.encode_outer(there, torch.zeros_like(there), residual, 0.5)
    assert np.array_equal(payload.cpu().numpy(), expected)
    assert same_bits(residual.cpu().numpy(), lost)


@grid(codec=CODECS, first=list(CHUNKS))
@folded(second=list(CHUNKS))
def test_each_after_each(target: Target, codec: ChunkedTopK, first: str, second: str) -> None:
    check(target, codec, vector(codec, [first, second]))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_many_in_turn(target: Target, codec: ChunkedTopK) -> None:
    """So many that several chunks make a task."""
    rng = np.random.default_rng(0)
    x = vector(codec, list(rng.choice(list(CHUNKS), 12 if EMULATED or codec.chunk > 256 else 300)))
    check(target, codec, x[:-7])


@grid(cover=1, size=[31, 32, 33, 63, 64, 65, 100, 127, 129])
def test_last_chunks_of_any_size(target: Target, size: int) -> None:
    codec = CODECS[2]
    check(target, codec, vector(codec, ["ones", "steps"])[: codec.chunk + size])
