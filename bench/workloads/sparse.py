"""Sparsifiers, beside a copy and beside `torch.topk`."""

from __future__ import annotations

import torch

from bagua_kernels.compression import Codec
from bagua_kernels.compression.sparse.threshold_topk import ThresholdTopK
from bagua_kernels.compression.sparse.topk import TopK
from bench.workloads.rows import Run, Workload, copy_row, encode_rows, gradient

RATIO = 0.01


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
        sparse_group("top 1 % by threshold", "ThresholdTopK", ThresholdTopK(RATIO), n, device),
        sparse_group("top 1 %, exact", "TopK", TopK(RATIO), n, device),
    ]
