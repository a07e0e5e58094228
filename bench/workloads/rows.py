"""What all measured rows share: the row itself, its inputs, and rows for a copy and for every backend.

A row counts the bytes that its question makes it read and write: float bytes and payload bytes. Temporaries of a row that
needs some are not counted, so that GB/s of one group compare as speeds do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bagua_kernels import knobs
from bagua_kernels.compression import Codec
from bagua_kernels.jit import op

# What moves memory and computes next to nothing: the roof that a group's rows are compared with.
COPY = "copy_"
SCALE = "mul_"
SEED = 0x0123_4567_89AB_CDEF

Run = Callable[[], object]
Prepare = Callable[[], Run]


@dataclass(frozen=True)
class Workload:
    """One row.

    Attributes:
        group: the question.
        subject: what is asked about, such as a codec; empty if the group has one subject.
        name: who answers: a backend's name, or a way of PyTorch's; unique among a group's rows of one subject.
        bytes: what it reads and writes.
        prepare: allocates inputs and returns the function to time, so that listing rows costs nothing.
        info: figures other than time, such as a codec's error; may run the row.
        unfused: for a fused path, the subject under which its group has the sequence of calls that it replaces.
    """

    group: str
    subject: str
    name: str
    bytes: int
    prepare: Prepare
    info: Callable[[], dict[str, float]] = dict
    unfused: str = ""

    @property
    def answer(self) -> str:
        """Subject and name."""
        return f"{self.subject} {self.name}".strip()


@functools.lru_cache(maxsize=1)
def gradient(n: int, device: torch.device) -> torch.Tensor:
    """Gradient-like values. Shared by rows, so that all of them read the same memory."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(n, generator=generator, device=device).mul_(1e-3)


def copy_row(group: str, n: int, device: torch.device) -> Workload:
    """The roof: what moves memory and computes nothing."""

    def prepare() -> Run:
        x = gradient(n, device)
        out = torch.empty_like(x)
        return lambda: out.copy_(x)

    return Workload(group, "", COPY, 8 * n, prepare)


def with_backend(backend: str, prepare: Prepare) -> Prepare:
    """`prepare` such that it and what it returns use one backend."""

    def prepared() -> Run:
        with knobs.override(knobs.BACKEND, backend):
            run = prepare()

        def on_backend() -> object:
            with knobs.override(knobs.BACKEND, backend):
                return run()

        return on_backend

    return prepared


def backend_rows(
    group: str,
    subject: str,
    moved: int,
    prepare: Prepare,
    device: torch.device,
    *,
    info: Callable[[Prepare], dict[str, float]] | None = None,
    unfused: str = "",
) -> list[Workload]:
    """A row for each backend that compiles for the device; `info` gets the `prepare` of that backend."""
    rows = []
    # NumPy's functions are a reference, and would take most of the time of a run.
    for name in (each for each in op.available(device) if each != "numpy"):
        prepared = with_backend(name, prepare)
        figures = functools.partial(info, prepared) if info else dict
        rows.append(Workload(group, subject, name, moved, prepared, figures, unfused))
    return rows


def relative_error(x: torch.Tensor, decoded: torch.Tensor) -> float:
    return float((decoded - x).double().norm() / x.double().norm())


def encode_rows(group: str, subject: str, codec: Codec, n: int, device: torch.device) -> list[Workload]:
    """Every backend's `encode`, with the payload's size and error."""
    size = codec.payload_size(n)

    def prepare() -> Run:
        x = gradient(n, device)
        payload = torch.empty(size, dtype=torch.uint8, device=device)
        return lambda: codec.encode(x, seed=SEED, out=payload)

    def info(prepared: Prepare) -> dict[str, float]:
        payload = prepared()()
        assert isinstance(payload, torch.Tensor)
        x = gradient(n, device)
        decoded = codec.decode(payload, torch.empty_like(x))
        return {"bytes_per_element": size / n, "relative_error": relative_error(x, decoded)}

    return backend_rows(group, subject, 4 * n + size, prepare, device, info=info)


def run_benchmark(benchmark: Any, row: Workload, elements: int, rounds: int) -> None:
    """Times a row with pytest-benchmark's fixture."""
    run = row.prepare()
    benchmark.group = row.group
    benchmark.pedantic(run, rounds=rounds, warmup_rounds=2)
    benchmark.extra_info.update(
        row.info(), subject=row.subject, answer=row.name, unfused=row.unfused, elements=elements
    )
    # There are no statistics under --benchmark-disable.
    if benchmark.stats is not None:
        benchmark.extra_info["gb_per_s"] = row.bytes / benchmark.stats.stats.median / 1e9
