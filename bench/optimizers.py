"""Measures whole optimizer steps: `python -m bench.optimizers [--compiled] [--output bench/results/optimizers.json]`.

Our optimizers beside all variants of PyTorch's, and beside the roof: an in-place scale of 64 Mi float32, which mostly moves
memory. Three models: (a) one tensor of 16 Mi values, (b) 400 tensors of a transformer, 25 M values, (c) 2,000 tensors of
1,000. A step is the call of `step()`, with hooks, checks of all addresses, and step counters. Rows of a group take turns. A turn
is one step, so that the other rows have used the caches before it. For (c), whose 32 MB may stay in a cache, a turn is ten steps.

The last table shows the first step of a process: with compilation, and with the cache on disk.

`python -m bench.optimizers --watch --output bench/results/watch.json` compares two ways of AdamW to look at its tensors. One
reads PyTorch's objects in memory (`BAGUA_KERNELS_WATCH`), one asks PyTorch. All tensors together have 25 M values.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bagua_kernels import knobs, optim
from bench import speed
from bench.workloads.rows import SCALE, Run, Workload

CPU = torch.device("cpu")
LARGE = 1 << 24
ROOF = 1 << 26
FUSED_IN_TORCH = ("SGD", "Adam", "AdamW", "Adagrad")
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "RMSprop": {"alpha": 0.99}}
NAMES = (*FUSED_IN_TORCH, "RMSprop", "NAdam", "RAdam", "Adadelta", "Adamax", "ASGD", "Rprop")
RATE = 1e-5
TURNS = {"c": 10}
WATCHED = 25_000_000
COUNTS = (64, 128, 256, 400, 600, 1000, 2000, 4000)


def one_tensor() -> list[tuple[int, ...]]:
    return [(LARGE,)]


def transformer(layers: int = 30, width: int = 256, vocabulary: int = 5000) -> list[tuple[int, ...]]:
    """400 tensors, 25 M values: layers, embeddings, and the convolutions of a stem."""
    layer = [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,)]
    layer += [(width, 4 * width), (width,), *[(width,)] * 4]
    shapes = [*layer * layers, (vocabulary, width), (512, width)]
    return shapes + [(48, 48, 3, 3), (48,)] * ((400 - len(shapes)) // 2)


def many_small() -> list[tuple[int, ...]]:
    return [(1000,)] * 2000


MODELS: dict[str, Callable[[], list[tuple[int, ...]]]] = {"a": one_tensor, "b": transformer, "c": many_small}


def parameters(shapes: list[tuple[int, ...]], device: torch.device) -> list[torch.nn.Parameter]:
    """Parameters with gradients."""
    found = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for p in found:
        p.grad = torch.randn_like(p) * 1e-2
    return found


def ways(name: str, model: str, compiled: bool) -> dict[str, Callable[[list[torch.nn.Parameter]], Run]]:
    """How a step can be taken: ours, and PyTorch's ways."""
    options = {"lr": RATE, **OPTIONS.get(name, {})}
    theirs = getattr(torch.optim, name)
    found: dict[str, Callable[[list[torch.nn.Parameter]], Run]] = {
        "bagua_kernels": lambda p: getattr(optim, name)(p, **options).step
    }
    if name in FUSED_IN_TORCH:
        found["torch fused"] = lambda p: theirs(p, **options, fused=True).step
    found["torch foreach"] = lambda p: theirs(p, **options, foreach=True).step
    # A loop over 2,000 tensors is no rival, and takes most of the time that measuring takes.
    if model != "c":
        found["torch loop"] = lambda p: theirs(p, **options, foreach=False).step
    if compiled:
        found["torch compiled"] = lambda p: torch.compile(theirs(p, **options, foreach=True).step)
    return found


def bytes_moved(name: str, values: int) -> int:
    """What a step of ours reads and writes: of the parameter, the gradient and the states, once each."""
    optimizer = getattr(optim, name)([torch.nn.Parameter(torch.zeros(1))], **OPTIONS.get(name, {}))
    rule = optimizer._update(optimizer.param_groups[0]).rule
    return 4 * values * (rule.arrays + len(rule.writes))


def group(model: str, name: str, threads: int | None, compiled: bool, device: torch.device = CPU) -> list[Workload]:
    """Rows of one optimizer on one model, on a GPU or with a number of threads."""
    shapes = MODELS[model]()
    moved = bytes_moved(name, sum(torch.Size(shape).numel() for shape in shapes))
    question = f"({model}) {name}" + (f", {threads} thread{'s' * (threads > 1)}" if threads else "")

    def scale() -> Run:
        if threads:
            torch.set_num_threads(threads)
        x = torch.ones(ROOF, device=device)
        return lambda: x.mul_(1.0)

    def prepare(make: Callable[[list[torch.nn.Parameter]], Run]) -> Run:
        if threads:
            torch.set_num_threads(threads)
        step = make(parameters(shapes, device))
        return step if turn == 1 else lambda: [step() for _ in range(turn)]

    turn = TURNS.get(model, 1)
    rows = [Workload(question, "", SCALE, 8 * ROOF, scale)]
    for way, make in ways(name, model, compiled).items():
        rows.append(Workload(question, "", way, turn * moved, functools.partial(prepare, make)))
    return rows


FIRST_STEP = """
import time
import torch
from bagua_kernels import knobs, optim
p = torch.nn.Parameter(torch.ones(100_000))
p.grad = torch.ones(100_000)
optimizer = getattr(optim, "{name}")([p])
start = time.perf_counter()
optimizer.step()
print(time.perf_counter() - start)
"""


def watched(count: int, on: bool) -> Run:
    """Steps of AdamW over so many tensors, by one thread."""
    torch.set_num_threads(1)
    optimizer = optim.AdamW(parameters([(WATCHED // count,)] * count, CPU), lr=RATE)
    with knobs.override(knobs.WATCH, on):
        # The second step decides.
        for _ in range(3):
            optimizer.step()
    return optimizer.step


def roof() -> Run:
    torch.set_num_threads(1)
    x = torch.ones(WATCHED)
    return lambda: x.mul_(1.0)


def gains_of_watching(rounds: int) -> list[dict[str, Any]]:
    """Rows with and without, and how many times as fast a step is with it."""
    rows: list[dict[str, Any]] = []
    for count in COUNTS:
        ways = {"watched": True, "asked": False}
        group = [
            Workload(f"{count} tensors", "", name, 28 * WATCHED, functools.partial(watched, count, on))
            for name, on in ways.items()
        ]
        group.append(Workload(f"{count} tensors", "", SCALE, 8 * WATCHED, roof))
        found = {row["name"]: row for row in speed.measure([group], rounds, speed.host_clock)}
        gain = found["asked"]["median_s"] / found["watched"]["median_s"]
        rows.append({"tensors": count, "watched_s": found["watched"]["median_s"], "gain": gain})
        speed.console().print(f"{count} tensors: {found['watched']['median_s'] * 1e3:.2f} ms, {gain:.3f} times as fast")
    return rows


def first_steps(name: str, repeats: int = 3) -> Iterator[dict[str, Any]]:
    """Seconds of the first step with an empty cache, and the median with what that has left there."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        command = [sys.executable, "-c", FIRST_STEP.format(name=name)]
        seconds = [
            float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
            for _ in range(1 + repeats)
        ]
    yield {"optimizer": name, "compiled_s": seconds[0], "cached_s": sorted(seconds[1:])[repeats // 2]}


def verdicts(rows: list[dict[str, Any]]) -> None:
    """Adds to each row of ours how many times as fast it is as PyTorch's ways of the same group."""
    for row in rows:
        if row["name"] == "bagua_kernels":
            rivals = {r["name"]: r["median_s"] for r in rows if r["group"] == row["group"] and r["name"][:5] == "torch"}
            row["times"] = {name: seconds / row["median_s"] for name, seconds in rivals.items()}
            row["times_best_of_torch"] = min(row["times"].values())


def summary(rows: list[dict[str, Any]]) -> Table:
    grid = Table("step", title="How many times as fast as PyTorch's ways", title_justify="left")
    for heading in ("ms", "of roof", "fused", "foreach", "loop", "compiled"):
        grid.add_column(heading, justify="right")
    for row in rows:
        if row["name"] == "bagua_kernels":
            times = [row["times"].get(f"torch {way}") for way in ("fused", "foreach", "loop", "compiled")]
            grid.add_row(
                row["group"],
                f"{row['median_s'] * 1e3 / TURNS.get(row['group'][1], 1):.2f}",
                f"{row['share_of_roof']:.0%}",
                *(f"{t:.2f}" if t else "" for t in times),
            )
    return grid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", default="abc")
    parser.add_argument("--names", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--threads", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--compiled", action="store_true", help="also torch.compile: minutes for each optimizer")
    parser.add_argument("--watch", action="store_true", help="only what reading PyTorch's objects in memory gains")
    options = parser.parse_args()
    described = speed.machine()
    if options.watch:
        gains = gains_of_watching(options.rounds)
        if options.output:
            speed.write(options.output, {"machine": described, "rounds": options.rounds, "rows": gains})
        return
    rows: list[dict[str, Any]] = []
    for model in options.models:
        for name in options.names:
            # The small ones of PyTorch's take long, and no question is asked of them.
            if model == "c" and name not in FUSED_IN_TORCH:
                continue
            for threads in options.threads:
                found = group(model, name, threads, options.compiled)
                rows += speed.measure([found], options.rounds, speed.host_clock)
                torch._dynamo.reset()
    verdicts(rows)
    console = speed.console()
    console.print(summary(rows))
    starts = [start for name in options.names for start in first_steps(name)]
    for start in starts:
        console.print(
            f"first step of {start['optimizer']}: {start['compiled_s']:.2f} s compiled, {start['cached_s']:.2f} s cached"
        )
    if options.output:
        speed.write(
            options.output, {"machine": described, "rounds": options.rounds, "rows": rows, "first_steps": starts}
        )


if __name__ == "__main__":
    main()
