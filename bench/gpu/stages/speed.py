"""Kernels beside a copy, steps of AdamW beside PyTorch's, and the host's time of the engine; alone on the machine."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.compression import QSGD, BlockCodec, MinMaxUInt4, MinMaxUInt8, Sign
from bagua_kernels.rules.optimizers import ADAM
from bench.gpu import marks
from bench.gpu.clocks import Clock, Run, medians
from bench.gpu.echo import Echo
from bench.gpu.stage import Context
from bench.workloads.elementwise import adamw_scalars
from bench.workloads.outer import BETA
from bench.workloads.outer import CODEC as CHUNKED

SEED = 0x0123_4567_89AB_CDEF
PAYLOADS = 4
CODECS: dict[str, BlockCodec] = {
    "8 bits": MinMaxUInt8(),
    "4 bits": MinMaxUInt4(),
    "1 bit": Sign(),
    "QSGD": QSGD(),
}


class Sizes(NamedTuple):
    """How much is measured.

    Attributes:
        elements: of a vector of codecs.
        tensor: elements of a large parameter.
        tensors: the number of small parameters.
        rounds: repetitions.
    """

    elements: int
    tensor: int
    tensors: int
    rounds: int


FULL, SMALL = Sizes(64 << 20, 16 << 20, 2000, 20), Sizes(5003, 3001, 70, 2)


class Row(NamedTuple):
    """One call.

    Attributes:
        name: what it does, and who does it.
        bytes: what it reads and writes.
        run: the call.
    """

    name: str
    bytes: int
    run: Run


def codec_rows(n: int, device: torch.device) -> Iterator[Row]:
    """Encode, decode, feedback and reduce; buffers are shared."""
    x = torch.randn(n, generator=torch.Generator(device).manual_seed(0), device=device).mul_(1e-3)
    out, residual = torch.empty_like(x), torch.zeros_like(x)
    yield Row("copy", 8 * n, lambda: out.copy_(x))
    for name, codec in CODECS.items():
        size = codec.payload_size(n)
        payload = codec.encode(x, seed=SEED)
        payloads, reduced = payload.repeat(PAYLOADS, 1), torch.empty_like(payload)

        def encode(codec: BlockCodec = codec, payload: torch.Tensor = payload) -> object:
            return codec.encode(x, seed=SEED, out=payload)

        def decode(codec: BlockCodec = codec, payload: torch.Tensor = payload) -> object:
            return codec.decode(payload, out)

        def feedback(codec: BlockCodec = codec, payload: torch.Tensor = payload) -> object:
            return codec.encode_feedback(x, residual, seed=SEED, out=payload)

        def reduce(
            codec: BlockCodec = codec, payloads: torch.Tensor = payloads, reduced: torch.Tensor = reduced
        ) -> object:
            return codec.reduce(payloads, n, scale=1 / PAYLOADS, seed=SEED, out=reduced)

        yield Row(f"encode, {name}", 4 * n + size, encode)
        yield Row(f"decode, {name}", 4 * n + size, decode)
        yield Row(f"reduce of {PAYLOADS}, {name}", (PAYLOADS + 1) * size, reduce)
        yield Row(f"feedback, {name}", 12 * n + size, feedback)
    outer = torch.empty(CHUNKED.payload_size(n), dtype=torch.uint8, device=device)
    start = x * 1.01
    yield Row(
        "sparse outer step", 16 * n + outer.numel(), lambda: CHUNKED.encode_outer(start, x, residual, BETA, out=outer)
    )
    codec = CODECS["8 bits"]
    payloads = codec.encode(x).repeat(PAYLOADS, 1)
    state = [torch.zeros(n, device=device) for _ in range(3)]
    scalars = adamw_scalars(10)
    yield Row(
        f"decode {PAYLOADS} and AdamW",
        24 * n + payloads.numel(),
        lambda: codec.decode_apply(payloads, ADAM, state, scalars, scale=1 / PAYLOADS),
    )


def parameters(shapes: Sequence[int], dtype: torch.dtype, odd: bool, device: torch.device) -> list[nn.Parameter]:
    """Parameters with gradients; the last one and its gradient begin 4 bytes or less after a multiple of 16 if `odd`."""
    found = []
    for place, n in enumerate(shapes):
        shift = int(odd and place == len(shapes) - 1)
        both = [torch.randn(n + shift, device=device, dtype=torch.float32).to(dtype)[shift:] for _ in range(2)]
        found.append(nn.Parameter(both[0]))
        found[-1].grad = both[1] * 1e-2 if not shift else shifted(both[1])
    return found


def shifted(x: torch.Tensor) -> torch.Tensor:
    """A copy that begins one element after a multiple of 16 bytes."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return memory[1:].copy_(x)


WAYS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "ours": lambda p: optim.AdamW(p, lr=1e-5),
    "torch fused": lambda p: torch.optim.AdamW(p, lr=1e-5, fused=True),
    "torch foreach": lambda p: torch.optim.AdamW(p, lr=1e-5, foreach=True),
}


def step_rows(
    what: str, shapes: Sequence[int], dtype: torch.dtype, odd: bool, device: torch.device, ways: Sequence[str]
) -> Iterator[Row]:
    """Steps of AdamW: four vectors are read and three are written."""
    for way in ways:
        optimizer = WAYS[way](parameters(shapes, dtype, odd, device))
        yield Row(f"AdamW {what}, {way}", 7 * dtype.itemsize * sum(shapes), optimizer.step)


def groups(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    """What is measured in turns; each group's memory is free again before the next one."""
    yield "codecs", lambda: codec_rows(sizes.elements, device)
    # One odd tensor beside a few large ones: its address must not slow the others down.
    layers = [sizes.tensor // 16] * 15 + [sizes.tensor // 16 - 3]
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for odd in (False, True):
            what = f"{name}, {'one odd tensor' if odd else 'aligned'}"
            ways = ("ours",) if odd else tuple(WAYS)
            yield what, lambda a=(what, layers, dtype, odd, device, ways): step_rows(*a)  # type: ignore[misc]
    small = [1000] * sizes.tensors
    what = f"{sizes.tensors:,} tensors"
    yield what, lambda: step_rows(what, small, torch.float32, False, device, tuple(WAYS))


class Many(nn.Module):
    """A module of many small parameters, whose gradients are made by one operation."""

    def __init__(self, tensors: int, device: torch.device) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(64, device=device) for _ in range(tensors))
        self.x = torch.randn(64 * tensors, device=device)

    def forward(self) -> torch.Tensor:
        return (torch.cat(list(self.all)) * self.x).sum()


def engine(sizes: Sizes, device: torch.device) -> dict[str, float]:
    """Host milliseconds of backward and of a step without an optimizer, with exchanges that cost nothing."""
    # Algorithms need a package that kernels do not.
    from bagua_kernels.algorithms import ByteGrad, GradientAllReduce

    kinds: dict[str, Any] = {"plain": None, "allreduce": GradientAllReduce, "bytegrad": ByteGrad}
    found: dict[str, float] = {}
    clock = Clock(device)
    for name, kind in kinds.items():
        module: nn.Module = Many(sizes.tensors, device)
        if kind is not None:
            module = kind(module, communicator=Echo(8, device), bucket_bytes=max(1, 64 * 4 * sizes.tensors // 40))
        seconds = []
        for _ in range(sizes.rounds + 5):
            module.zero_grad(set_to_none=True)
            loss = module()
            clock.synchronize()
            start = time.perf_counter()
            loss.backward()
            seconds.append(time.perf_counter() - start)
            clock.synchronize()
        found[name] = round(1e3 * statistics.median(seconds[5:]), 3)
        if kind is not None:
            module.close()  # type: ignore[operator]
    return found


def run(context: Context) -> None:
    """Measures group after group, and prints each figure as soon as it is there."""
    device = context.place
    sizes = SMALL if context.small else FULL
    clock, roof, errors = Clock(device), 0.0, list[str]()
    for name, rows_of in groups(sizes, device):
        try:
            roof = group(clock, usable(rows_of(), errors), sizes.rounds, roof)
        except Exception as error:
            traceback.print_exc()
            errors.append(f"{name}: {type(error).__name__}: {error}")
            marks.row(errors[-1][:140])
        gc.collect()
        if context.on_gpu:
            torch.cuda.empty_cache()
    try:
        host = engine(sizes, device)
        marks.figures({"backward host ms": host})
        marks.row(f"host ms of backward, {sizes.tensors:,} parameters in 40 buckets, 8 ranks without a network: {host}")
    except Exception as error:
        traceback.print_exc()
        errors.append(f"engine: {type(error).__name__}: {error}")
    marks.headline(f"copy {roof:,.0f} GB/s")
    if errors:
        raise marks.Differs("; ".join(errors))


def usable(rows: Iterable[Row], errors: list[str]) -> list[Row]:
    """The rows whose first call works; it compiles. The others are noted as errors."""
    found: list[Row] = []

    def note(name: str, error: Exception) -> None:
        traceback.print_exc()
        errors.append(f"{name}: {type(error).__name__}: {error}"[:300])
        marks.row(errors[-1][:140])

    try:
        for row in rows:
            try:
                row.run()
            except Exception as error:
                note(row.name, error)
            else:
                found.append(row)
    except Exception as error:
        # What prepares the next row failed; those before it are measured all the same.
        note("preparation", error)
    return found


def group(clock: Clock, rows: Sequence[Row], rounds: int, roof: float) -> float:
    """Measures some rows in turns; returns the rate of the copy, which is the first row of the first group."""
    found = medians(clock, [row.run for row in rows], rounds)
    for row, (host, gpu) in zip(rows, found, strict=True):
        rate = row.bytes / gpu / 1e9
        roof = rate if row.name == "copy" else roof
        figures = {
            "GB/s": round(rate, 1),
            "of copy": round(rate / roof, 3),
            "host ms": round(1e3 * host, 4),
            "GPU ms": round(1e3 * gpu, 4),
        }
        marks.figures({row.name: figures})
        marks.row(
            f"{row.name:<40} {rate:8,.0f} GB/s {rate / roof:5.2f} of copy, host {1e3 * host:8.3f} ms, GPU {1e3 * gpu:8.3f} ms"
        )
    return roof
