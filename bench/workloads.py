"""What is measured: named rows in groups, each group one question. Used by every benchmark here.

A row counts the bytes that its question makes it read and write: float bytes and payload bytes. Temporaries of a row that
needs some are not counted, so that GB/s of one group compare as speeds do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bagua_kernels import knobs
from bagua_kernels.compression import MinMaxUInt8
from bagua_kernels.jit import op
from bagua_kernels.launchers import elementwise
from bagua_kernels.rules.optimizers import ADAMW

BLOCK = 256
RANKS = 4
CODEC_ELEMENTS = 25_000_000
ADAMW_ELEMENTS = 16_777_216
COPY = "copy_"
SEED = 0x0123_4567_89AB_CDEF

OPTIMIZERS = ("fused", "foreach")
LR, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01


@dataclass(frozen=True)
class Workload:
    """One row.

    Attributes:
        group: the question.
        name: the answer's name, unique in its group.
        bytes: what it reads and writes.
        prepare: allocates inputs and returns the function to time, so that listing rows costs nothing.
        info: figures other than time, such as a codec's error; may run the row.
    """

    group: str
    name: str
    bytes: int
    prepare: Callable[[], Callable[[], object]]
    info: Callable[[], dict[str, float]] = dict


@functools.lru_cache(maxsize=1)
def gradient(n: int, device: torch.device) -> torch.Tensor:
    """Gradient-like values. Shared by rows, so that all of them read the same memory."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(n, generator=generator, device=device).mul_(1e-3)


def copy_row(group: str, n: int, device: torch.device) -> Workload:
    """The roof: what moves memory and computes nothing."""

    def prepare() -> Callable[[], object]:
        x = gradient(n, device)
        out = torch.empty_like(x)
        return lambda: out.copy_(x)

    return Workload(group, COPY, 8 * n, prepare)


def with_backend(backend: str, prepare: Callable[[], Callable[[], object]]) -> Callable[[], Callable[[], object]]:
    """`prepare` such that it and what it returns use one backend."""

    def prepared() -> Callable[[], object]:
        with knobs.override(knobs.BACKEND, backend):
            run = prepare()

        def on_backend() -> object:
            with knobs.override(knobs.BACKEND, backend):
                return run()

        return on_backend

    return prepared


def relative_error(x: torch.Tensor, decoded: torch.Tensor) -> float:
    return float((decoded - x).double().norm() / x.double().norm())


def eager_encode(x: torch.Tensor, stochastic: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The quantizer as one writes it with PyTorch operations: (minima, steps, codes)."""
    blocks = x.view(-1, BLOCK)
    low = blocks.amin(1, keepdim=True)
    step = (blocks.amax(1, keepdim=True) - low) / 255
    steps = (blocks - low) / step
    if stochastic:
        steps = steps + (torch.rand_like(steps) - 0.5)
    return low, step, steps.round().clamp(0, 255).to(torch.uint8)


def eager_decode(low: torch.Tensor, step: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return (codes.to(torch.float32) * step + low).view(-1)


def full_blocks(n: int) -> int:
    """The PyTorch rows leave the last, short block out: padding would cost them another copy of everything."""
    return n // BLOCK * BLOCK


def encode_rows(n: int, device: torch.device, stochastic: bool = False) -> list[Workload]:
    group = "encode, stochastic" if stochastic else "encode"
    codec = MinMaxUInt8(BLOCK, stochastic=stochastic)
    size = codec.payload_size(n)

    def ours() -> Callable[[], object]:
        x = gradient(n, device)
        payload = torch.empty(size, dtype=torch.uint8, device=device)
        return lambda: codec.encode(x, seed=SEED, out=payload)

    def our_info(prepare: Callable[[], Callable[[], object]]) -> dict[str, float]:
        payload = prepare()()
        assert isinstance(payload, torch.Tensor)
        x = gradient(n, device)
        decoded = codec.decode(payload, torch.empty_like(x))
        return {"bytes_per_element": size / n, "relative_error": relative_error(x, decoded)}

    def eager() -> Callable[[], object]:
        x = gradient(n, device)[: full_blocks(n)]
        return lambda: eager_encode(x, stochastic)

    def eager_info() -> dict[str, float]:
        x = gradient(n, device)[: full_blocks(n)]
        parts = eager_encode(x, stochastic)
        stored = sum(part.numel() * part.element_size() for part in parts)
        return {
            "bytes_per_element": stored / x.numel(),
            "relative_error": relative_error(x, eager_decode(*parts)),
        }

    rows = [copy_row(group, n, device)]
    for name in op.available(device):
        prepare = with_backend(name, ours)
        rows.append(Workload(group, name, 4 * n + size, prepare, functools.partial(our_info, prepare)))
    return [*rows, Workload(group, "torch", 4 * n + size, eager, eager_info)]


def decode_rows(n: int, device: torch.device) -> list[Workload]:
    group = "decode"
    codec = MinMaxUInt8(BLOCK)
    size = codec.payload_size(n)

    def ours() -> Callable[[], object]:
        payload = codec.encode(gradient(n, device))
        out = torch.empty(n, device=device)
        return lambda: codec.decode(payload, out)

    def eager() -> Callable[[], object]:
        parts = eager_encode(gradient(n, device)[: full_blocks(n)], stochastic=False)
        return lambda: eager_decode(*parts)

    rows = [copy_row(group, n, device)]
    rows += [Workload(group, name, 4 * n + size, with_backend(name, ours)) for name in op.available(device)]
    return [*rows, Workload(group, "torch", 4 * n + size, eager)]


def reduce_rows(n: int, device: torch.device) -> list[Workload]:
    group = f"reduce of {RANKS}"
    codec = MinMaxUInt8(BLOCK)
    size = codec.payload_size(n)

    def ours() -> Callable[[], object]:
        payloads = codec.encode(gradient(n, device)).repeat(RANKS, 1)
        out = torch.empty(size, dtype=torch.uint8, device=device)
        return lambda: codec.reduce(payloads, n, scale=1 / RANKS, out=out)

    def eager() -> Callable[[], object]:
        encoded = eager_encode(gradient(n, device)[: full_blocks(n)], stochastic=False)
        payloads = [tuple(part.clone() for part in encoded) for _ in range(RANKS)]

        def run() -> object:
            total = eager_decode(*payloads[0])
            for parts in payloads[1:]:
                total += eager_decode(*parts)
            return eager_encode(total.mul_(1 / RANKS), stochastic=False)

        return run

    moved = (RANKS + 1) * size
    rows = [copy_row(group, n, device)]
    rows += [Workload(group, name, moved, with_backend(name, ours)) for name in op.available(device)]
    return [*rows, Workload(group, "torch", moved, eager)]


def adamw_scalars(step: int) -> tuple[float, ...]:
    bias1, bias2 = 1 - BETA1**step, 1 - BETA2**step
    return (1 - LR * DECAY, 1 - BETA1, BETA2, 1 - BETA2, EPS, LR / bias1, bias2**0.5)


def adamw_rows(n: int, device: torch.device) -> list[Workload]:
    group = "AdamW"
    # Reads parameter, gradient and two moments, writes all but the gradient.
    moved = 7 * 4 * n

    def ours() -> Callable[[], object]:
        gradients = gradient(n, device)
        p, m, v = (torch.zeros(n, device=device) for _ in range(3))
        scalars = adamw_scalars(10)
        return lambda: elementwise.apply(ADAMW, (p, gradients, m, v), scalars)

    def optimizer(kind: str) -> Callable[[], object]:
        p = torch.zeros(n, device=device, requires_grad=True)
        p.grad = gradient(n, device)
        return torch.optim.AdamW([p], LR, (BETA1, BETA2), EPS, DECAY, **{kind: True}).step

    rows = [copy_row(group, n, device)]
    rows += [Workload(group, name, moved, with_backend(name, ours)) for name in op.available(device)]
    rows += [Workload(group, f"torch {kind}", moved, functools.partial(optimizer, kind)) for kind in OPTIMIZERS]
    return rows


def codec_groups(device: torch.device, n: int = CODEC_ELEMENTS) -> list[list[Workload]]:
    return [
        encode_rows(n, device),
        encode_rows(n, device, stochastic=True),
        decode_rows(n, device),
        reduce_rows(n, device),
    ]


def elementwise_groups(device: torch.device, n: int = ADAMW_ELEMENTS) -> list[list[Workload]]:
    return [adamw_rows(n, device)]


def run_benchmark(benchmark, row: Workload) -> None:
    """Times a row with pytest-benchmark's fixture."""
    run = row.prepare()
    benchmark.group = row.group
    benchmark.pedantic(run, rounds=15, warmup_rounds=2)
    benchmark.extra_info.update(row.info())
    # There are no statistics under --benchmark-disable.
    if benchmark.stats is not None:
        benchmark.extra_info["gb_per_s"] = row.bytes / benchmark.stats.stats.median / 1e9
