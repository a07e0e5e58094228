"""Codecs: `encode` and `decode` of blocks, `encode` of sparsifiers, beside a copy and beside PyTorch."""

from __future__ import annotations

import functools

import torch

from bagua_kernels.compression import (
    FP8,
    QSGD,
    AbsMaxInt4,
    AbsMaxInt8,
    BlockCodec,
    Codec,
    MinMaxUInt4,
    MinMaxUInt8,
    Natural,
    Sign,
    TernGrad,
    ThresholdTopK,
    TopK,
)
from bench.workloads.rivals import Rival, full_blocks, rivals
from bench.workloads.rows import Run, Workload, backend_rows, copy_row, encode_rows, gradient, relative_error

Codecs = dict[str, BlockCodec]
RATIO = 0.01  # of sparsifiers

INT8: Codecs = {"AbsMaxInt8": AbsMaxInt8(), "MinMaxUInt8": MinMaxUInt8()}
INT4: Codecs = {"AbsMaxInt4": AbsMaxInt4(), "MinMaxUInt4": MinMaxUInt4()}
SIGN: Codecs = {"Sign": Sign()}
FLOAT8: Codecs = {"FP8 e4m3": FP8()}
STOCHASTIC: Codecs = {
    "MinMaxUInt8": MinMaxUInt8(stochastic=True),
    "QSGD 4 bits": QSGD(bits=4),
    "TernGrad": TernGrad(),
    "Natural": Natural(),
}


def encode_group(group: str, codecs: Codecs, n: int, device: torch.device) -> list[Workload]:
    def prepare(codec: BlockCodec, rival: Rival) -> Run:
        x = gradient(n, device)[: full_blocks(n, codec.block)]
        return lambda: rival.encode(x)

    def info(codec: BlockCodec, rival: Rival) -> dict[str, float]:
        x = gradient(n, device)[: full_blocks(n, codec.block)]
        # Nothing is left of a vector that is shorter than a block.
        if not x.numel():
            return {}
        parts = rival.encode(x)
        return {
            "bytes_per_element": rival.stored(parts) / x.numel(),
            "relative_error": relative_error(x, rival.decode(*parts)),
        }

    rows = [copy_row(group, n, device)]
    for subject, codec in codecs.items():
        rows += encode_rows(group, subject, codec, n, device)
        moved = 4 * n + codec.payload_size(n)
        for rival in rivals(codec, device):
            run = functools.partial(prepare, codec, rival)
            rows.append(Workload(group, subject, rival.name, moved, run, functools.partial(info, codec, rival)))
    return rows


def decode_group(group: str, codecs: Codecs, n: int, device: torch.device) -> list[Workload]:
    def ours(codec: BlockCodec) -> Run:
        payload = codec.encode(gradient(n, device))
        out = torch.empty(n, device=device)
        return lambda: codec.decode(payload, out)

    def theirs(codec: BlockCodec, rival: Rival) -> Run:
        parts = rival.encode(gradient(n, device)[: full_blocks(n, codec.block)])
        return lambda: rival.decode(*parts)

    rows = [copy_row(group, n, device)]
    for subject, codec in codecs.items():
        moved = 4 * n + codec.payload_size(n)
        rows += backend_rows(group, subject, moved, functools.partial(ours, codec), device)
        for rival in rivals(codec, device):
            rows.append(Workload(group, subject, rival.name, moved, functools.partial(theirs, codec, rival)))
    return rows


def eager_topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k as one writes it with PyTorch operations: (indices, values)."""
    index = torch.topk(x.abs(), k, sorted=False).indices
    return index, x[index]


def sparse_group(group: str, subject: str, codec: Codec, n: int, device: torch.device) -> list[Workload]:
    def eager() -> Run:
        x = gradient(n, device)
        k = max(1, int(RATIO * n))
        return lambda: eager_topk(x, k)

    return [
        copy_row(group, n, device),
        *encode_rows(group, subject, codec, n, device),
        Workload(group, subject, "torch", 4 * n + codec.payload_size(n), eager),
    ]


def groups(n: int, device: torch.device) -> list[list[Workload]]:
    return [
        encode_group("encode, 8 bits", INT8, n, device),
        decode_group("decode, 8 bits", INT8, n, device),
        encode_group("encode, 4 bits", INT4, n, device),
        decode_group("decode, 4 bits", INT4, n, device),
        encode_group("encode, 1 bit", SIGN, n, device),
        decode_group("decode, 1 bit", SIGN, n, device),
        encode_group("encode, stochastic", STOCHASTIC, n, device),
        encode_group("encode, FP8", FLOAT8, n, device),
    ]


def sparse_groups(n: int, device: torch.device) -> list[list[Workload]]:
    return [
        sparse_group("top 1 % by threshold", "ThresholdTopK", ThresholdTopK(RATIO), n, device),
        sparse_group("top 1 %, exact", "TopK", TopK(RATIO), n, device),
    ]
