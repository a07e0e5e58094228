"""Each registered codec once, on few elements, with the bytes of an oracle and of the NumPy backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from bagua_kernels.compression import Codec, codec, from_spec
from bagua_kernels.compression.codec import FusedFeedback
from tests.conftest import Target
from tests.emulated.same import on_both
from tests.grids import grid
from tests.oracles import block_quantizers, chunked, sparse
from tests.oracles.block_rules import Spec
from tests.oracles.vectors import F32, make, same_bits

# Little below a power of four, where random places are found at the first attempts.
N, RANKS, SEED, RATIO = 61, 3, (3 << 32) + 11, 0.1
U8 = npt.NDArray[np.uint8]


class Oracle(Protocol):
    """What a payload holds, independent of the code under test."""

    def encode(self, x: F32, seed: int) -> U8: ...
    def decode(self, payload: U8, n: int) -> F32: ...


@dataclass(frozen=True)
class Blocks:
    """A block quantizer."""

    spec: Spec

    def encode(self, x: F32, seed: int) -> U8:
        return block_quantizers.encode(self.spec, x, seed)

    def decode(self, payload: U8, n: int) -> F32:
        return block_quantizers.decode(self.spec, payload, n)


@dataclass(frozen=True)
class Elements:
    """All elements in a dtype."""

    dtype: torch.dtype

    def encode(self, x: F32, seed: int) -> U8:
        stored = torch.from_numpy(x).to(self.dtype).view(torch.uint8).numpy()
        return sparse.part(stored)

    def decode(self, payload: U8, n: int) -> F32:
        stored = torch.from_numpy(payload[: n * self.dtype.itemsize].copy()).view(self.dtype)
        return stored.float().numpy()


@dataclass(frozen=True)
class Largest:
    """The largest magnitudes, in a payload with room for some number of them."""

    chosen: Callable[[F32], npt.NDArray[np.int64]]
    room: int

    def encode(self, x: F32, seed: int) -> U8:
        return sparse.payload(x, self.chosen(x), self.room)

    def decode(self, payload: U8, n: int) -> F32:
        """A vector of fewer than 65536 elements has one end, which 16 bytes hold, after the 16 bytes of a head."""
        count = int(payload[:8].view("<u8")[0])
        offsets = payload[32 : 32 + 2 * count].view("<u2")
        begin = 32 + -(-2 * self.room // 16) * 16
        out = np.zeros(n, np.float32)
        out[offsets] = payload[begin : begin + 4 * count].view("<f4")
        return out


@dataclass(frozen=True)
class Drawn:
    """Elements that the seed chooses."""

    def encode(self, x: F32, seed: int) -> U8:
        index = sparse.permutation(x.size, sparse.kept(RATIO, x.size), seed)
        return np.concatenate([sparse.part(np.array([len(index), seed], "<u8")), sparse.part(x[index])])

    def decode(self, payload: U8, n: int) -> F32:
        count, seed = map(int, payload[:16].view("<u8"))
        out = np.zeros(n, np.float32)
        out[sparse.permutation(n, count, seed)] = payload[16 : 16 + 4 * count].view("<f4")
        return out


@dataclass(frozen=True)
class Chunks:
    """The largest of each chunk."""

    k: int
    chunk: int

    def encode(self, x: F32, seed: int) -> U8:
        return chunked.encode(x, self.k, self.chunk)

    def decode(self, payload: U8, n: int) -> F32:
        return chunked.decode(payload, n, self.k, self.chunk)


class Case(NamedTuple):
    """A codec and its oracle."""

    codec: Codec
    oracle: Oracle


def of_blocks(name: str, spec: Spec, options: str = "") -> Case:
    return Case(from_spec(f"{name}:block={spec.block}{options}"), Blocks(spec))


KEPT = sparse.kept(RATIO, N)
# By registered name.
CODECS = {
    "minmax_uint8": of_blocks("minmax_uint8", Spec("minmax", 32, bits=8)),
    "minmax_uint4": of_blocks("minmax_uint4", Spec("minmax", 32, bits=4, stochastic=True), ",stochastic=true"),
    "minmax_uint2": of_blocks("minmax_uint2", Spec("minmax", 32, bits=2, stochastic=True)),
    "absmax_int8": of_blocks("absmax_int8", Spec("absmax", 32, bits=8, stochastic=True), ",stochastic=true"),
    "absmax_int4": of_blocks("absmax_int4", Spec("absmax", 32, bits=4)),
    "qsgd": of_blocks("qsgd", Spec("absmax", 32, levels=7, bits=4, stochastic=True, norm="l2"), ",levels=7,norm=l2"),
    "terngrad": of_blocks("terngrad", Spec("absmax", 32, levels=1, bits=2, stochastic=True)),
    "sign": of_blocks("sign", Spec("sign", 32, bits=1, means=2), ",two_means=true"),
    "natural": of_blocks("natural", Spec("natural", 32, stochastic=True)),
    "fp8": of_blocks("fp8", Spec("fp8", 32, format="e5m2", stochastic=True), ",format=e5m2,stochastic=true"),
    "two_magnitudes": of_blocks("two_magnitudes", Spec("magnitudes", 32)),
    "identity": Case(from_spec("identity"), Elements(torch.float32)),
    "cast": Case(from_spec("cast"), Elements(torch.bfloat16)),
    "topk": Case(from_spec(f"topk:ratio={RATIO}"), Largest(lambda x: sparse.topk(x, KEPT), KEPT)),
    "threshold_topk": Case(
        from_spec(f"threshold_topk:ratio={RATIO}"),
        Largest(partial(sparse.threshold_topk, ratio=RATIO), sparse.capacity(KEPT, N)),
    ),
    "randomk": Case(from_spec(f"randomk:ratio={RATIO}"), Drawn()),
    "chunked_topk": Case(from_spec("chunked_topk:k=5,chunk=32"), Chunks(5, 32)),
}
every_codec = grid(case=CODECS)


def test_every_codec_is_here(target: Target) -> None:
    found = {name for name, make in codec._codecs.items() if make.__module__.startswith("bagua_kernels.")}
    assert found == CODECS.keys()


def vectors() -> list[F32]:
    return [make("heavy", N, 1e-2, rank) for rank in range(RANKS)]


@every_codec
def test_encode(target: Target, case: Case) -> None:
    x = vectors()[0]
    (payload,) = on_both(target, lambda device: [case.codec.encode(torch.from_numpy(x).to(device), seed=SEED)])
    assert np.array_equal(payload.numpy(), case.oracle.encode(x, SEED))


@every_codec
def test_decode(target: Target, case: Case) -> None:
    payload = case.oracle.encode(vectors()[0], SEED)

    def run(device: torch.device) -> list[torch.Tensor]:
        return [case.codec.decode(torch.from_numpy(payload).to(device), torch.full((N,), 3.0, device=device))]

    (out,) = on_both(target, run)
    assert same_bits(out.numpy(), case.oracle.decode(payload, N))


@every_codec
def test_sums(target: Target, case: Case) -> None:
    """In the order of the ranks; `reduce` encodes the sum."""
    payloads = np.stack([case.oracle.encode(x, SEED) for x in vectors()])

    def run(device: torch.device) -> list[torch.Tensor]:
        there = torch.from_numpy(payloads).to(device)
        total = case.codec.decode_sum(there, torch.full((N,), 3.0, device=device), 1 / 3)
        return [total, case.codec.reduce(there, N, scale=1 / 3, seed=SEED)]

    total, reduced = on_both(target, run)
    expected = np.zeros(N, np.float32)
    for payload in payloads:
        expected = expected + case.oracle.decode(payload, N)
    expected = expected * np.float32(1 / 3)
    assert same_bits(total.numpy(), expected)
    assert np.array_equal(reduced.numpy(), case.oracle.encode(expected, SEED))


@grid(case={name: case for name, case in CODECS.items() if isinstance(case.codec, FusedFeedback)})
def test_feedback(target: Target, case: Case) -> None:
    assert isinstance(case.codec, FusedFeedback)
    x, residual, _ = vectors()

    def run(device: torch.device) -> list[torch.Tensor]:
        left = torch.from_numpy(residual.copy()).to(device)
        return [case.codec.encode_feedback(torch.from_numpy(x).to(device), left, seed=SEED), left]

    payload, left = on_both(target, run)
    expected = case.oracle.encode(x + residual, SEED)
    assert np.array_equal(payload.numpy(), expected)
    assert same_bits(left.numpy(), x + residual - case.oracle.decode(expected, N))
