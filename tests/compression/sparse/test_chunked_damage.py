"""What ChunkedTopK promises beside its bytes: contraction, refusal of damaged payloads and of wrong arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_kernels.compression import ChunkedTopK, Codec, Contractive, from_spec
from bagua_kernels.compression.codec import FusedFeedback, to_spec
from tests.compression.sparse.test_chunked import CODECS, VECTORS, decoded, on, plain, same, shape, some
from tests.conftest import EMULATED, Target
from tests.grids import grid
from tests.oracles import chunked as oracle
from tests.oracles.vectors import F32, make


@grid(codec=CODECS, vector=VECTORS)
def test_declared_contraction_holds(target: Target, codec: Any, vector: Callable[[int, int], F32]) -> None:
    """Also for short vectors, of which fewer elements than `k m / chunk` may be kept."""
    if EMULATED:
        pytest.skip("statistics are a matter of the bytes, which other tests compare")
    k, chunk = shape(codec)
    assert isinstance(codec.bias, Contractive)
    assert 0 < codec.bias.delta <= k / chunk
    for n in (chunk, 3 * chunk, chunk // 2, chunk + 9, 1, 9, *(3 * chunk * j // (2 * k) - 1 for j in (1, 2, 3))):
        x = vector(k, max(1, n))
        out = decoded(codec, codec.encode(on(target, x)), x.size)
        error = np.sum((out.astype(np.float64) - x) ** 2)
        assert error <= (1 - codec.bias.delta) * np.sum(x.astype(np.float64) ** 2) * (1 + 1e-9)


def readers(codec: Any, good: torch.Tensor, payload: torch.Tensor, out: torch.Tensor) -> Iterator[Callable[[], Any]]:
    """Everything that decodes a payload."""
    yield lambda: codec.decode(payload, out)
    for rows in (payload[None], torch.stack([good, payload, good])):
        yield lambda rows=rows: codec.decode_sum(rows, out)
        yield lambda rows=rows: codec.mean(rows, out, contributors=True)
        yield lambda rows=rows: codec.mean(rows, out, contributors=False)
        yield lambda rows=rows: codec.reduce(rows, out.numel())


def words_of(payload: torch.Tensor) -> np.ndarray:
    return plain(payload).copy().view("<u4")


def test_damage_is_refused(target: Target) -> None:
    """The cases of the specification, each by hand, in the first chunk and in a short last one."""
    codec = ChunkedTopK(k=5, chunk=32)  # two low bits, so that a record has one word of each part
    x = np.zeros(32 + 20, np.float32)
    x[[0, 3, 9, 16, 31, 32, 40, 51]] = 1.0
    good = codec.encode(on(target, x))
    words = words_of(good)
    kept = [0, 3, 9, 16, 31], [0, 8, 19]
    low = [sum((i & 3) << 2 * j for j, i in enumerate(chosen)) for chosen in kept]
    high = [sum(1 << (i >> 2) + j for j, i in enumerate(chosen)) for chosen in kept]
    assert words[[0, 4]].tolist() == low
    assert words[[1, 5]].tolist() == high
    damages = [
        {1: high[0] & ~1},  # one entry is missing
        {1: 0},
        {5: high[1] & ~1},
        {1: high[0] | 1 << 9},  # one too many
        {1: high[0] | 1 << 31},
        {5: high[1] | 1 << 20},
        {0: low[0] | 3},  # elements 3 and 3
        {0: low[0] & ~(3 << 2) | 3},  # elements 3 and 0
        {1: high[0] & ~(1 << 11) | 1 << 12},  # element 35
        {1: high[0] & ~(1 << 11) | 1 << 31},
        {5: high[1] & ~(1 << 6) | 1 << 7},  # element 23 of 20
        {5: high[1] & ~(1 << 6) | 1 << 7, 4: low[1] & 0xF},  # element 20 of 20
    ]
    for changes in damages[::4] if EMULATED else damages:
        changed = words.copy()
        for at, value in changes.items():
            changed[at] = value
        with pytest.raises(ValueError, match=r"set bits|ascend|beyond"):
            oracle.decode(changed.view(np.uint8), 52, *shape(codec))
        payload = torch.from_numpy(changed.view(np.uint8)).to(target.device)
        for read in readers(codec, good, payload, torch.empty(52, device=target.device)):
            with pytest.raises(ValueError, match=r"(?i)payload|record|chunk"):
                read()


@given(data=st.data())
def test_damage_is_refused_or_read_as_by_the_oracle(target: Target, data: st.DataObject) -> None:
    """Any bits but those of the magnitudes, of which some mean nothing."""
    codec = data.draw(st.sampled_from(CODECS[:3]))
    n = some(codec)
    good = codec.encode(on(target, make("heavy", n, 1.0, 0)))
    words, size = words_of(good), sum(oracle.words(*shape(codec)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, -(-n // codec.chunk) - 1)) * size + data.draw(st.integers(0, size - 2))
        words[at] ^= 1 << data.draw(st.integers(0, 31))
    bytes_ = words.view(np.uint8)
    payload = torch.from_numpy(bytes_).to(target.device)
    buffer = torch.full((n + 200,), 7.0, device=target.device)
    out = buffer[100 : 100 + n]
    try:
        expected = oracle.decode(bytes_, n, *shape(codec))
    except ValueError:
        for read in readers(codec, good, payload, out):
            with pytest.raises(ValueError, match=r"(?i)payload|record|chunk"):
                read()
    else:
        assert same(plain(codec.decode(payload, out)), expected)
        rows = [plain(good), bytes_, plain(good)]
        codec.mean(torch.stack([good, payload, good]), out, contributors=True)
        assert same(plain(out), oracle.mean(rows, n, *shape(codec), contributors=True))
    assert (buffer[:100] == 7).all()
    assert (buffer[100 + n :] == 7).all()


@given(seed=st.integers(0, 2**32 - 1), codec=st.sampled_from(CODECS[:3]))
def test_any_bytes_write_nothing_elsewhere(target: Target, seed: int, codec: Any) -> None:
    n = some(codec)
    good = codec.encode(torch.ones(n, device=target.device))
    noise = np.random.default_rng(seed).integers(0, 256, codec.payload_size(n), np.uint8)
    buffer = torch.full((n + 200,), 7.0, device=target.device)
    for read in readers(codec, good, torch.from_numpy(noise).to(target.device), buffer[100 : 100 + n]):
        try:
            oracle.decode(noise, n, *shape(codec))
        except ValueError:
            with pytest.raises(ValueError, match=r"(?i)payload|record|chunk"):
                read()
        else:
            read()
        assert (buffer[:100] == 7).all()
        assert (buffer[100 + n :] == 7).all()


def test_arguments() -> None:
    codec = ChunkedTopK(k=64, chunk=4096)
    payload = codec.encode(torch.ones(9000))
    for size in (0, 16, payload.numel() - 16):
        with pytest.raises(ValueError, match="payload"):
            codec.decode(payload[:size], torch.empty(9000))
        with pytest.raises(ValueError, match="payload"):
            codec.decode_sum(payload[None, :size], torch.empty(9000))
        with pytest.raises(ValueError, match="payload"):
            codec.mean(payload[None, :size], torch.empty(9000), contributors=True)
    with pytest.raises(TypeError, match="residual"):
        codec.encode_feedback(torch.ones(4), torch.ones(4, dtype=torch.float16))
    with pytest.raises(ValueError, match="residual"):
        codec.encode_feedback(torch.ones(4), torch.ones(5))
    with pytest.raises(ValueError, match="residual"):
        codec.encode_outer(torch.ones(4), torch.ones(4), torch.ones(5), 1.0)
    with pytest.raises(TypeError, match="start"):
        codec.encode_outer(torch.ones(4, dtype=torch.float16), torch.ones(4, dtype=torch.float16), torch.ones(4), 1.0)
    with pytest.raises(ValueError, match=r"start|x must"):
        codec.encode_outer(torch.ones(5), torch.ones(4), torch.ones(4), 1.0)


@pytest.mark.parametrize("k", [0, -1, 65])
def test_wrong_k(k: int) -> None:
    with pytest.raises(ValueError, match="k"):
        ChunkedTopK(k=k, chunk=64)


@pytest.mark.parametrize("chunk", [0, 16, 48, 100, 8192, -64])
def test_wrong_chunk(chunk: int) -> None:
    with pytest.raises(ValueError, match="chunk"):
        ChunkedTopK(k=1, chunk=chunk)


def test_wrong_text() -> None:
    for options in ("k=65,chunk=64", "k=0,chunk=64", "k=2.5,chunk=64", "k=few,chunk=64", "k=4,chunk=48", "ratio=0.1"):
        with pytest.raises(ValueError, match=r"k|chunk"):
            from_spec(f"chunked_topk:{options}")


def test_declarations() -> None:
    codec = ChunkedTopK(k=64, chunk=4096)
    assert from_spec("chunked_topk:k=64,chunk=4096") == codec
    assert from_spec(to_spec(ChunkedTopK(k=3, chunk=64))) == ChunkedTopK(k=3, chunk=64) != codec
    assert hash(ChunkedTopK(k=64, chunk=4096)) == hash(codec)
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.k = 65  # type: ignore[misc]
    assert isinstance(codec, Codec)
    assert isinstance(codec, FusedFeedback)
    assert codec.block == 4096
    assert not codec.linear
    assert not codec.stochastic
    assert isinstance(codec.bias, Contractive)
    assert 0 < codec.bias.delta <= 1 / 64
    assert [codec.payload_size(n) for n in (0, 1, 4096, 4097, 16384)] == [0, 96, 96, 176, 336]
    for k, chunk in ((1, 32), (32, 32), (63, 64), (100, 512), (4096, 4096)):
        for n in (0, 1, chunk, 5 * chunk + 1):
            assert ChunkedTopK(k=k, chunk=chunk).payload_size(n) == oracle.payload_size(n, k, chunk)
