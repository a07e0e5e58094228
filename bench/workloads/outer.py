"""The sparse step of local training: the fused path of `ChunkedTopK` beside our own calls, a copy, and PyTorch."""

from __future__ import annotations

import functools

import torch

from bagua_kernels.compression import ChunkedTopK
from bench.workloads.rivals import EAGER, Parts, full_blocks
from bench.workloads.rows import Run, Workload, backend_rows, copy_row, gradient

BETA = 0.95
CODEC = ChunkedTopK()


@functools.lru_cache(maxsize=1)
def parameters(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Parameters before and after local steps. Shared by rows, so that all of them read the same memory."""
    start = torch.randn(n, generator=torch.Generator(device).manual_seed(1), device=device)
    return start, start - gradient(n, device)


def eager_step(start: torch.Tensor, x: torch.Tensor, residual: torch.Tensor, beta: float, k: int, chunk: int) -> Parts:
    """The step as one writes it with PyTorch operations, for whole chunks.

    Returns:
        The indices in each chunk, the codes, a byte each, and both magnitudes of each chunk.
    """
    chunks = residual.mul_(beta).add_(start - x).view(x.numel() // chunk, chunk)
    index = torch.topk(chunks.abs(), k, dim=1, sorted=False).indices
    values = chunks.gather(1, index)
    sizes = values.abs()
    total, middle = sizes.sum(1, keepdim=True), sizes.mean(1, keepdim=True)
    for turn in range(5):
        upper = sizes > middle
        many = upper.sum(1, keepdim=True)
        large = (sizes * upper).sum(1, keepdim=True)
        low, high = (total - large) / (k - many), large / many.clamp(min=1)
        high = torch.where(many > 0, high, low)
        if turn < 4:
            middle = (low + high) / 2
    low, high = low.bfloat16(), high.bfloat16()
    sent = torch.where(upper, high, low).float().copysign(values)
    chunks.scatter_add_(1, index, sent.neg())
    codes = upper.to(torch.uint8) | (values < 0).to(torch.uint8) << 1
    return index.to(torch.int16), codes, low, high


def groups(n: int, device: torch.device) -> list[list[Workload]]:
    """Reads the parameters before and after and the residual, writes the residual and the payload."""
    group, subject, steps = "sparse outer step", "ChunkedTopK", "ChunkedTopK unfused"
    moved = 16 * n + CODEC.payload_size(n)

    def fused() -> Run:
        (start, x), residual = parameters(n, device), torch.zeros(n, device=device)
        payload = torch.empty(CODEC.payload_size(n), dtype=torch.uint8, device=device)
        return lambda: CODEC.encode_outer(start, x, residual, BETA, out=payload)

    def unfused() -> Run:
        (start, x), residual = parameters(n, device), torch.zeros(n, device=device)
        payload = torch.empty(CODEC.payload_size(n), dtype=torch.uint8, device=device)
        difference = torch.empty(n, device=device)

        def run() -> object:
            torch.sub(start, x, out=difference)
            CODEC.encode(residual.mul_(BETA).add_(difference), out=payload)
            return residual.sub_(CODEC.decode(payload, difference))

        return run

    def eager() -> Run:
        whole = full_blocks(n, CODEC.chunk)
        (start, x), residual = parameters(n, device), torch.zeros(whole, device=device)
        start, x = start[:whole], x[:whole]
        return lambda: eager_step(start, x, residual, BETA, CODEC.k, CODEC.chunk)

    return [
        [
            copy_row(group, n, device),
            *backend_rows(group, subject, moved, fused, device, unfused=steps),
            *backend_rows(group, steps, moved, unfused, device),
            Workload(group, subject, EAGER, moved, eager),
        ]
    ]
