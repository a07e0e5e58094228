"""Trainings on the GPU beside the CPU's: all algorithms with threads as ranks, and some with two processes over NCCL."""

from __future__ import annotations

import math
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bagua_kernels import comm
from bagua_kernels.algorithms import names
from bench.gpu import digests, marks, trainings
from bench.gpu.child import ROOT
from bench.gpu.pair import environments, joined, rank
from bench.gpu.stage import Context
from bench.gpu.workers import Worker, run_workers

# Processes of thread ranks: most of their time goes into compiling.
PARTS = 6
SMALL = ("allreduce", "bytegrad", "local_sgd")
WATCHED_STEP = 20
FLOORS = tuple(str(ROOT / floor) for floor in ("bagua_kernels", "comm", "algorithms"))


def run(context: Context) -> None:
    """Starts all processes, or is one of them."""
    kind, _, which = context.part.partition(" ")
    if kind == "threads":
        threads(context, int(which))
        return
    if kind == "processes":
        processes(context)
        return
    parts = 1 if context.small else PARTS
    bindings = ("torch", "cupy") if context.on_gpu else ("torch",)
    commands: dict[str, list[str]] = {}
    own: dict[str, dict[str, str]] = {}
    for number, variables in enumerate(environments(bindings[0])):
        name = f"{bindings[0]} {number}"
        commands[name], own[name] = context.command("training", "processes"), variables
    commands |= {f"threads {i}": context.command("training", f"threads {i}") for i in range(parts)}
    workers = run_workers(
        commands, (0.65 if len(bindings) > 1 else 1.0) * context.left - 2.0, environment=own, on_figures=tell
    )
    for binding in bindings[1:]:
        commands, own = {}, {}
        for number, variables in enumerate(environments(binding)):
            name = f"{binding} {number}"
            commands[name], own[name] = context.command("training", "processes"), variables
        workers |= run_workers(commands, context.left - 2.0, environment=own)
    conclude(workers, bindings)


def tell(workers: dict[str, Worker]) -> None:
    """Prints how many trainings are over."""
    rows = [
        row
        for worker in workers.values()
        for name, row in worker.figures.items()
        if isinstance(row, dict) and "ok" in row
    ]
    marks.headline(f"{sum(row['ok'] for row in rows)} of {len(rows)} trainings as on the CPU")


def conclude(workers: dict[str, Worker], bindings: tuple[str, ...]) -> None:
    """Compares the ranks of processes, prints all figures, and raises if something is wrong."""
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    for worker in workers.values():
        marks.figures({f"{worker.name}, {name}": value for name, value in worker.figures.items()})
        marks.figures(
            {f"{worker.name}, process": {"outcome": worker.outcome, "seconds": worker.seconds, "reason": worker.reason}}
        )
        if worker.outcome == "refused":
            marks.row(f"{worker.name}: refused: {worker.reason}")
        elif worker.bad:
            wrong.append(f"{worker.name}: {worker.outcome}: {worker.reason}")
        for name, row in worker.figures.items():
            if isinstance(row, dict) and "ok" in row:
                counts["of"] += 1
                counts["ok"] += row["ok"]
                if not row["ok"]:
                    wrong.append(f"{worker.name}, {name}: {row.get('why', row)}")
    for binding in bindings:
        pair = [workers[f"{binding} {number}"] for number in range(2)]
        for name in trainings.BY_PROCESSES:
            found = [worker.figures[name]["parameters"] for worker in pair if name in worker.figures]
            if len(set(found)) > 1:
                wrong.append(f"{binding}, {name}: ranks end with other bits")
                marks.row(f"{binding}, {name}: ranks end with other bits")
        first = pair[0].figures
        if "syncs" in first:
            marks.row(f"{binding}: syncs in step {WATCHED_STEP}: {first['syncs'] or 'none'}")
            host = {name: first[name]["backward ms"] for name in trainings.BY_PROCESSES if name in first}
            marks.row(f"{binding}: host ms of backward, {2 * (len(trainings.DEEP) + 1)} parameters: {host}")
    marks.headline(f"{counts['ok']} of {counts['of']} trainings as on the CPU, with equal bits on all ranks")
    for each in wrong[:12]:
        marks.row(each)
    if wrong:
        raise marks.Differs("; ".join(wrong)[:1500])


def judged(name: str, found: list[trainings.Trained], losses: dict[str, list[float]]) -> dict[str, Any]:
    """A training's figures, and whether they are right."""
    difference, most = trainings.gap(name, found[0].loss, losses)
    equal = len({each.parameters for each in found}) == 1
    near = difference <= most
    why = "" if equal else "ranks end with other bits"
    if not near:
        why = f"{why} loss {found[0].loss:.5f}, the CPU's is {losses[name][0]:.5f}".strip()
    return {
        "ok": equal and near,
        "equal": equal,
        "loss": found[0].loss,
        "gap": round(difference, 6),
        **({"why": why} if why else {}),
    }


def threads(context: Context, part: int) -> None:
    """Every sixth algorithm, with two ranks that are threads of this process."""
    device, losses = context.place, digests.read()[digests.LOSSES]
    for name in SMALL if context.small else names()[part::PARTS]:
        if context.on_gpu and name in trainings.CPU_ONLY:
            continue
        start = time.perf_counter()
        try:
            row = judged(name, trainings.by_threads(name, device), losses)
        except Exception as error:
            traceback.print_exc()
            row = {"ok": False, "why": f"{type(error).__name__}: {error}"[:400]}
        marks.figures({name: {**row, "seconds": round(time.perf_counter() - start, 2)}})


def processes(context: Context) -> None:
    """One of two ranks: some algorithms on a deep network, one after the other."""
    communicator = joined(context)
    losses, syncs = digests.read()[digests.LOSSES], dict[str, Counter[str]]()
    for name in SMALL if context.small else trainings.BY_PROCESSES:
        watch = Watch(context.on_gpu)
        result = trainings.train(
            communicator,
            name,
            communicator.device,
            steps=trainings.DEEP_STEPS,
            widths=trainings.DEEP,
            around_step=watch.around_step,
        )
        shares = {"parameters": result.parameters, "backward ms": result.backward_ms}
        # Only rank 0's loss is known; equal bits of both are looked at where both figures are there.
        row = judged(f"deep {name}", [result], losses) if rank() == 0 else {"ok": math.isfinite(result.loss)}
        marks.figures({name: {**row, **shares}})
        syncs[name] = watch.places
    if rank() == 0:
        marks.figures({"syncs": {name: dict(places) for name, places in syncs.items() if places}})
    comm.shutdown()


class Watch:
    """Lists the places of one step that wait for the GPU.

    Attributes:
        places: how often each place waited.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self.places: Counter[str] = Counter()

    def around_step(self, step: int, take: Callable[[], None]) -> None:
        """Takes a step."""
        if self._on_gpu and step == WATCHED_STEP:
            self._listen(take)
        else:
            take()

    def _listen(self, take: Callable[[], None]) -> None:
        before, lock = warnings.showwarning, threading.Lock()

        def note(message: Warning | str, *arguments: Any, **options: Any) -> None:
            if "synchroniz" not in str(message):
                before(message, *arguments, **options)
                return
            with lock:
                self.places[place()] += 1

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                take()
            finally:
                torch.cuda.set_sync_debug_mode("default")
                warnings.showwarning = before


def place() -> str:
    """The innermost line of this package on the stack of this thread."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(FLOORS):
            return f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}"
    for frame in reversed(traceback.extract_stack()):
        if "bench/gpu" in frame.filename and not frame.filename.endswith("stages/training.py"):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return "elsewhere"
