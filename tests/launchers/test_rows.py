"""Chunks in rows: the payloads and the elements of chunks that are encoded and decoded one by one."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels.compression import BlockCodec, from_spec
from bagua_kernels.launchers.blockwise import Rows
from tests.conftest import Target
from tests.grids import grid

CODECS = (
    "minmax_uint8:block=32",
    "absmax_int4:block=64",
    "qsgd:block=32",
    "sign:block=32,two_means=true",
    "fp8:block=32",
)
BEHIND = 48
# Elements of the vector, from one chunk to the next, of a chunk, and chunks: all full, the last one short, some empty, odd.
CUTS = [(256, 64, 64, 4), (200, 64, 64, 4), (130, 128, 64, 4), (77, 64, 33, 2), (1, 64, 64, 3)]


@grid(spec=CODECS, cut=CUTS, dtype=[torch.float32, torch.bfloat16], counted=[False, True], cover=1)
def test_rows_are_chunks(
    target: Target, spec: str, cut: tuple[int, int, int, int], dtype: torch.dtype, counted: bool
) -> None:
    codec = from_spec(spec)
    assert isinstance(codec, BlockCodec)
    rows = Rows(*cut)
    x = torch.randn(rows.total, generator=torch.Generator().manual_seed(3)).to(dtype).to(target.device)
    blocks = -(-rows.total // codec.block)
    counts = torch.arange(blocks, dtype=torch.int32, device=target.device) % codec.block + 1 if counted else None
    seeds = [1 << 63 | 5, 6, 7, 8][: rows.count]
    size = codec.payload_size(rows.width)
    message = torch.full((rows.count, size + BEHIND), 201, dtype=torch.uint8, device=target.device)
    codec.encode_rows(x, message[:, :size], rows, seeds=seeds, counts=counts)
    out = torch.full((rows.total,), 9.0, dtype=dtype, device=target.device)
    codec.decode_rows(message[:, :size], out, rows)
    expected = torch.full_like(message, 201)
    decoded = torch.full_like(out, 9.0)
    for row in range(rows.count):
        part = rows.part(row)
        chunk = x[part].clone()
        if not chunk.numel():
            continue
        own = (
            None if counts is None else counts[part.start // codec.block :][: -(-chunk.numel() // codec.block)].clone()
        )
        payload = codec.encode(chunk, seed=seeds[row], counts=own)
        expected[row, : payload.numel()] = payload
        decoded[part] = codec.decode(payload, torch.empty_like(chunk))
    assert torch.equal(message, expected)
    assert torch.equal(out, decoded)


@pytest.mark.parametrize(
    ("spec", "dtype"), [("minmax_uint8:block=32", torch.bfloat16), ("qsgd:block=32", torch.float32)]
)
def test_rows_of_pieces_are_pieces(target: Target, spec: str, dtype: torch.dtype) -> None:
    """Rows of as many blocks and other sizes, with seeds of their own, and bytes behind them that stay."""
    codec = from_spec(spec)
    assert isinstance(codec, BlockCodec)
    sizes = [(33, 3), (64, 1), (1, 40)]
    generator = torch.Generator().manual_seed(3)
    pieces = [[torch.randn(n, generator=generator).to(dtype).to(target.device) for n in row] for row in sizes]
    seeds = [1 << 63 | 5, 6, 7]
    size = codec.payload_size(3 * codec.block)
    message = torch.full((len(sizes), size + BEHIND), 201, dtype=torch.uint8, device=target.device)
    codec.encode_rows_of_pieces(pieces, message[:, :size], seeds=seeds)
    expected = torch.full_like(message, 201)
    for row, each in enumerate(pieces):
        codec.encode_pieces(each, seed=seeds[row], out=expected[row, :size])
    assert torch.equal(message, expected)


def test_what_does_not_fit_is_refused() -> None:
    codec, x = from_spec("minmax_uint8:block=32"), torch.zeros(64)
    assert isinstance(codec, BlockCodec)
    payloads = torch.zeros((2, codec.payload_size(32)), dtype=torch.uint8)
    with pytest.raises(ValueError, match="got 64 elements"):
        codec.encode_rows(x, payloads, Rows(65, 32, 32, 2), seeds=[0, 0])
    with pytest.raises(ValueError, match="multiples of"):
        codec.encode_rows(x, payloads, Rows(64, 33, 32, 2), seeds=[0, 0])
    with pytest.raises(ValueError, match="payloads must have shape"):
        codec.encode_rows(x, payloads, Rows(64, 32, 32, 3), seeds=[0, 0, 0])
    with pytest.raises(ValueError, match="a seed for each of 2 chunks"):
        from_spec("qsgd:block=32").encode_rows(
            x,
            torch.zeros((2, 64), dtype=torch.uint8)[:, : from_spec("qsgd:block=32").payload_size(32)],
            Rows(64, 32, 32, 2),
            seeds=[1],
        )
