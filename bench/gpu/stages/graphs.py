"""Captured CUDA graphs: steps of AdamW and codecs, replayed beside the same calls without a graph."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch

from bagua_kernels import optim
from bagua_kernels.compression import MinMaxUInt8, Sign
from bagua_kernels.optim.step.extras import Extras
from bench.gpu import marks
from bench.gpu.cases import SIZES, digest
from bench.gpu.inputs import vector
from bench.gpu.stage import Context

REPLAYS = 4
WARMUP = 3


def captured(take: Callable[[], object], on_gpu: bool) -> Callable[[], object]:
    """What replays a call; without a GPU the call itself."""
    if not on_gpu:
        return take
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        take()
    return graph.replay


def codec_replays(codec: Any, device: torch.device) -> bool:
    """Encodes and decodes new inputs in the same memory."""
    n = 16_387
    x, out = vector("normal", n).to(device), torch.zeros(n, device=device)
    payload = torch.zeros(codec.payload_size(n), dtype=torch.uint8, device=device)

    def take() -> None:
        codec.encode(x, out=payload)
        codec.decode(payload, out)

    on_side_stream(take, device)
    replay = captured(take, device.type == "cuda")
    for turn in range(REPLAYS):
        x.copy_(vector("normal", n, salt=turn + 1))
        replay()
        other = torch.zeros_like(out)
        codec.decode(codec.encode(x), other)
        if digest(other) != digest(out):
            return False
    return True


def step_replays(dtype: torch.dtype, precision: str, device: torch.device) -> bool:
    """Steps of one optimizer by a graph, and of another one without; gradients stay where they are."""
    pairs = [parameters(dtype, device) for _ in range(2)]
    extras = Extras(precision=precision, seed=3)  # type: ignore[arg-type]
    optimizers = [optim.AdamW(each, lr=1e-2, capturable=device.type == "cuda", extras=extras) for each in pairs]
    # The first steps make the states.
    for step in range(WARMUP):
        for each, optimizer in zip(pairs, optimizers, strict=True):
            give(each, step)
            on_side_stream(optimizer.step, device, times=1)
    replay = captured(optimizers[0].step, device.type == "cuda")
    for step in range(WARMUP, WARMUP + REPLAYS):
        for each in pairs:
            give(each, step)
        replay()
        optimizers[1].step()
    one, two = (digest(torch.cat([p.detach().view(-1) for p in each])) for each in pairs)
    return one == two


def parameters(dtype: torch.dtype, device: torch.device) -> list[torch.nn.Parameter]:
    values = vector("normal", sum(SIZES), dtype, 1).to(device).split(SIZES)
    return [torch.nn.Parameter(part.clone()) for part in values]


def give(params: list[torch.nn.Parameter], step: int) -> None:
    """Puts the gradients of a step in place."""
    drawn = vector("normal", sum(SIZES), params[0].dtype, 10 + step).to(params[0].device).split(SIZES)
    for p, gradient in zip(params, drawn, strict=True):
        if p.grad is None:
            p.grad = gradient.clone()
        else:
            p.grad.copy_(gradient)


def on_side_stream(take: Callable[[], object], device: torch.device, times: int = 2) -> None:
    """Warms up on another stream, as PyTorch asks for before a capture."""
    if device.type != "cuda":
        take()
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            take()
    torch.cuda.current_stream().wait_stream(stream)


def run(context: Context) -> None:
    """Runs each case for itself."""
    device = context.place
    cases: dict[str, Callable[[], bool]] = {
        "MinMaxUInt8": lambda: codec_replays(MinMaxUInt8(), device),
        "Sign": lambda: codec_replays(Sign(), device),
        "AdamW float32": lambda: step_replays(torch.float32, "nearest", device),
        "AdamW bfloat16": lambda: step_replays(torch.bfloat16, "nearest", device),
        "AdamW bfloat16, stochastic": lambda: step_replays(torch.bfloat16, "stochastic", device),
    }
    found: dict[str, str] = {}
    for name, case in cases.items():
        try:
            found[name] = "equal" if case() else "differs"
        except Exception as error:
            traceback.print_exc()
            found[name] = f"{type(error).__name__}: {error}"[:300]
        marks.figures({name: found[name]})
    wrong = {name: result for name, result in found.items() if result != "equal"}
    marks.headline(f"{len(found) - len(wrong)} of {len(found)} graphs replay the results of calls")
    for name, result in wrong.items():
        marks.row(f"{name}: {result}")
    if wrong and not context.fake:
        raise marks.Differs(", ".join(wrong))
