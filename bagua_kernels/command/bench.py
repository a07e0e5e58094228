"""Times of a few kernels beside a copy of the same tensor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua_kernels import optim
from bagua_kernels.command.output import show_json, show_rows
from bagua_kernels.compression import from_spec

_CODECS = ("minmax_uint8", "sign")
_UNTIMED = 3  # rounds, in the first of which kernels are compiled
_ADAM = 28  # bytes per element: parameter, gradient and two moments are read, all but the gradient are written


@dataclass(frozen=True)
class Case:
    """A kernel with its tensors.

    Attributes:
        name: for the table.
        run: starts the kernel.
        moved: bytes that it has to read and write.
    """

    name: str
    run: Callable[[], object]
    moved: int


def cases(elements: int, device: torch.device) -> list[Case]:
    """Returns the copy, and then the kernels.

    Args:
        elements: of each tensor, float32.
        device: where the tensors are.
    """
    x = torch.randn(elements, device=device)
    out = torch.empty_like(x)
    found = [Case("copy", lambda: out.copy_(x), 8 * elements)]
    for spec in _CODECS:
        codec = from_spec(spec)
        payload = codec.encode(x)
        moved = 4 * elements + payload.numel()
        found.append(Case(f"{spec} encode", lambda c=codec, p=payload: c.encode(x, out=p), moved))  # type: ignore[misc]
        found.append(Case(f"{spec} decode", lambda c=codec, p=payload: c.decode(p, out), moved))  # type: ignore[misc]
    for name, kind in (("AdamW step", optim.AdamW), ("torch.optim.AdamW step", torch.optim.AdamW)):
        parameter = torch.nn.Parameter(x.clone())
        parameter.grad = torch.ones_like(x)
        found.append(Case(name, kind([parameter], lr=1e-3, fused=True).step, _ADAM * elements))
    return found


def seconds(found: Sequence[Case], repeats: int, device: torch.device) -> list[float]:
    """Returns the median time of each case; they take turns, so that all see the same changes of the machine."""
    times: list[list[float]] = [[] for _ in found]
    for number in range(_UNTIMED + repeats):
        for case, own in zip(found, times, strict=True):
            _wait(device)
            began = time.perf_counter()
            case.run()
            _wait(device)
            if number >= _UNTIMED:
                own.append(time.perf_counter() - began)
    return [statistics.median(own) for own in times]


def rows(elements: int, repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Returns each case with its median, its rate, and its time relative to that of the copy."""
    found = cases(elements, device)
    medians = seconds(found, repeats, device)
    return [
        {
            "kernel": case.name,
            "milliseconds": 1e3 * median,
            "GB_per_s": case.moved / median / 1e9,
            "times_a_copy": median / medians[0],
        }
        for case, median in zip(found, medians, strict=True)
    ]


def show(elements: int, repeats: int, kind: str, as_json: bool) -> None:
    """Prints the table.

    Raises:
        ValueError: there is no GPU, and the kernels were to run on one.
    """
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no GPU here: leave out --device, or pass --device cpu")
    found, threads = rows(elements, repeats, torch.device(kind)), torch.get_num_threads()
    if as_json:
        show_json({"elements": elements, "repeats": repeats, "device": kind, "threads": threads, "kernels": found})
    else:
        show_rows(f"{elements:,} float32 elements on {kind}, medians of {repeats}, {threads} threads", found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
