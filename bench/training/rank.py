"""One rank of a training benchmark: builds rivals, has links set to rates, takes steps in turns, and prints seconds."""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bagua_kernels import algorithms, comm, optim
from bagua_kernels.algorithms import Exchange
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Tuning
from bench.network.rank import together
from bench.training.models import batch, model

Times = dict[str, list[float]]

_SMALL_BUCKETS = 1 << 20
# Rivals, how many times as long as backward their bytes take on the wire, and their options.
_OVERLAPS: list[tuple[list[str], float, dict[str, Any]]] = [
    (["allreduce"], 1.0, {"bucket_bytes": _SMALL_BUCKETS}),
    (["bytegrad"], 1.0, {"bucket_bytes": _SMALL_BUCKETS}),
    (["allreduce in backward"], 1.75, {}),
]
_WARM = 3  # steps: DDP lays out buckets anew in the second, its PowerSGD begins with the third
_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
_PAYLOAD = 1448 / 1514  # of an Ethernet frame that carries TCP with time stamps
OURS: dict[str, tuple[type[algorithms.Algorithm], dict[str, Any]]] = {
    "allreduce": (algorithms.GradientAllReduce, {}),
    "bytegrad": (algorithms.ByteGrad, {}),
    "int8": (algorithms.CompressedAllReduce, {"codec": "absmax_int8", "error_feedback": False}),
    "sign": (algorithms.SignSGD, {}),
    "topk": (algorithms.TopK, {"ratio": 0.01}),
    **{f"powersgd {rank}": (algorithms.PowerSGD, {"rank": rank}) for rank in (1, 2, 4)},
    **{f"powersgd {rank} in turn": (algorithms.PowerSGD, {"rank": rank, "alternate": True}) for rank in (2, 4)},
}
OURS |= {
    **{
        f"{name} if faster": (kind, {**own, "only_if_faster": True})
        for name, (kind, own) in OURS.items()
        if kind is not algorithms.GradientAllReduce and not own.get("alternate")
    },
    **{
        f"{name} in backward": (OURS[name][0], {**OURS[name][1], "apply_in_backward": True})
        for name in (
            "allreduce",
            "bytegrad",
            *(f"powersgd {rank}{sides}" for rank in (2, 4) for sides in ("", " in turn")),
        )
    },
}


class Silent(algorithms.GradientAllReduce):
    """All the work of the engine, and no communication."""

    name = "silent"

    def exchange_for(self, bucket: Bucket, communicator: comm.Communicator) -> Exchange:
        """See `GradientAlgorithm.exchange_for`."""
        return Nothing(bucket, communicator)


class Nothing(Exchange):
    """Leaves each rank its own gradients."""

    # As what it stands for: it does not care either where a bucket's memory is.
    one_collective = True
    takes_memory = True
    has_memory = False

    def run(self, step: int) -> Iterator[comm.Work]:
        """See `Exchange.run`."""
        yield from ()


def ddp(module: torch.nn.Module, hook: str) -> torch.nn.Module:
    """DDP as it is, or with a communication hook."""
    if hook.startswith("powersgd"):
        # With several buckets the hook's collectives meet those of other buckets on Gloo, and a rank aborts.
        wrapped = DistributedDataParallel(module, bucket_cap_mb=1000)
        rank = int(hook.split()[1])
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return wrapped
    wrapped = DistributedDataParallel(module, broadcast_buffers=hook != "silent")
    if hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "silent":
        # Not a function with annotations: DDP compares them with classes, and here they are strings.
        wrapped.register_comm_hook(None, lambda state, bucket: _done(bucket.buffer()))
    return wrapped


def _done(x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(x)
    return future


class Rival:
    """A copy of a model with its optimizer, and a way to train it."""

    def __init__(
        self,
        name: str,
        of: str,
        keep: bool = False,
        wrapper: type[algorithms.Algorithm] | None = None,
        **options: Any,
    ) -> None:
        """Builds it; collective.

        Args:
            name: "alone", "ddp", "ddp" and a hook, or one of `OURS`.
            of: the model's name.
            keep: True if gradients are zeroed instead of dropped before a step.
            wrapper: the algorithm, instead of the one of that name.
            **options: more arguments of ours.
        """
        self.name, self.keep = name, keep
        module = model(of)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
        self.algorithm: algorithms.Algorithm | None = None
        self.module = module
        if wrapper is not None:
            self.module = self.algorithm = wrapper(module, broadcast_buffers=False)
        elif name in OURS:
            kind, arguments = OURS[name]
            if arguments.get("apply_in_backward"):
                self.optimizer = optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
            self.module = self.algorithm = kind(module, self.optimizer, **arguments, **options)
        elif name.startswith("ddp"):
            self.module = ddp(module, name.removeprefix("ddp").strip())
        self.x, self.y = batch(of, comm.rank())

    def backward(self) -> None:
        self.loss().backward()

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=not self.keep)
        return torch.nn.functional.cross_entropy(self.module(self.x), self.y)

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def warm_up(self) -> None:
        for _ in range(_WARM):
            self.step()

    def try_out(self) -> str:
        """Takes the steps in which an algorithm measures whether compression pays; returns the result."""
        if self.algorithm is None or "if faster" not in self.name:
            return ""
        while self.algorithm.stats().trial not in ("compressed", "plain"):
            self.step()
        return self.algorithm.stats().trial

    def follow(self, tuning: Tuning | None) -> None:
        """Has the algorithm's own communicators, which were made before, follow a tuning."""
        if self.algorithm is not None and isinstance(self.algorithm._communicator, comm.StripedCommunicator):
            for each in self.algorithm._communicators():
                assert isinstance(each, comm.StripedCommunicator)
                each.retune(tuning or Tuning())

    def close(self) -> None:
        if self.algorithm is not None:
            self.algorithm.close()


class Links:
    """The links of the lab, whose rate rank 0 has set by the process that made it."""

    def __init__(self, c: comm.Communicator, address: str) -> None:
        self._communicator = c
        self._connection = Client(address, "AF_UNIX") if c.rank == 0 else None

    def set(self, rate: float | None) -> None:
        """Waits for all ranks, and limits all links to `rate` Mbit/s; collective."""
        self._communicator.barrier().wait()
        if self._connection is not None:
            self._connection.send(rate)
            if problem := self._connection.recv():
                raise RuntimeError(f"the links could not be set to {rate} Mbit/s: {problem}")
        self._communicator.barrier().wait()


def measure(
    c: comm.Communicator, rivals: dict[str, Rival], rounds: int, counted: int, order: random.Random
) -> tuple[Times, dict[str, dict[str, float]]]:
    """Takes steps in blocks of one rival; the order of blocks in a round is random, the same everywhere.

    A block begins with a step that is not counted. There is no barrier between its steps: as in training, messages of the last
    step may still be under way, and ranks may be apart. A step lasts from the end of the previous step to its own end, both on
    the last rank.

    Returns:
        For each rival the seconds of each step. Per step, as a mean over ranks: `cpu` seconds and `bytes` that left the host. For
        our algorithms also the seconds of `exchange`, and `wait`, those in which training waited for them.
    """
    moments: Times = {name: [] for name in rivals}
    costs = {name: dict.fromkeys(("cpu", "bytes", "exchange", "wait"), 0.0) for name in rivals}
    for _ in range(rounds):
        for name in order.sample(sorted(rivals), len(rivals)):
            rival, cost = rivals[name], costs[name]
            before = _engine(rival)
            together(c)
            rival.step()
            moments[name].append(time.monotonic())
            before |= _host()
            for _ in range(counted):
                rival.step()
                moments[name].append(time.monotonic())
            after = _host()
            # A rank that is through must not compute beside the others' last step.
            c.barrier().wait()
            after |= _engine(rival)
            for what, value in after.items():
                # Statistics sum up residuals, so they are not asked for between steps.
                steps = counted if what in ("cpu", "bytes") else counted + 1
                cost[what] += (value - before[what]) / steps
    everyone = c.all_gather_object((moments, costs))
    taken = {}
    for name in rivals:
        last = np.array([theirs[name] for theirs, _ in everyone]).max(axis=0).reshape(rounds, counted + 1)
        taken[name] = np.diff(last).ravel().tolist()
    means = {
        name: {what: sum(theirs[name][what] for _, theirs in everyone) / (rounds * c.size) for what in costs[name]}
        for name in rivals
    }
    return taken, means


def _host() -> dict[str, float]:
    return {"cpu": time.process_time(), "bytes": float(_SENT.read_text())}


def _engine(rival: Rival) -> dict[str, float]:
    if rival.algorithm is None:
        return {}
    # This sums up residuals, so it is not called between steps.
    stats = rival.algorithm.stats()
    return {"exchange": stats.exchange_seconds, "wait": stats.wait_seconds}


def tuned(c: comm.Communicator, budget: float, known: str | None) -> Tuning | None:
    if c.size == 1 or not isinstance(c, comm.StripedCommunicator):
        return None
    if known is None:
        return comm.tune(budget=budget)
    tuning = Tuning.from_json(known)
    c.retune(tuning)
    return tuning


def steps(c: comm.Communicator, links: Links, settings: dict[str, Any]) -> dict[str, Any]:
    """All rates for all groups of rivals. Not all rivals at once: four ranks' copies would not fit into the memory."""
    order, rows, tunings = random.Random(7), [], dict(settings["tunings"])
    for group, rates in settings["groups"]:
        # Unlimited, for parameters are broadcast when a rival is made.
        links.set(None)
        rivals = {name: Rival(name, settings["model"]) for name in group}
        for rival in rivals.values():
            rival.warm_up()
        for rate, rounds, counted in rates:
            links.set(rate)
            tuning = tuned(c, settings["budget"], tunings.get(str(rate)))
            if tuning is not None:
                tunings[str(rate)] = tuning.to_json()
            for rival in rivals.values():
                rival.follow(tuning)
            trials = {name: rival.try_out() for name, rival in rivals.items()}
            taken, costs = measure(c, rivals, rounds, counted, order)
            rows.append({"rate_mbit": rate, "times": taken, "costs": costs, "trials": trials})
        for rival in rivals.values():
            rival.close()
        rivals.clear()
        gc.collect()
    return {"rows": rows, "tunings": tunings}


def engine(c: comm.Communicator, links: Links, settings: dict[str, Any]) -> dict[str, Any]:
    """What the engine costs by itself: rank 0 trains on, while the other waits and leaves it the machine."""
    del links
    rivals = {
        "alone": Rival("alone", "resnet18"),
        "engine": Rival("", "resnet18", wrapper=Silent),
        "ddp": Rival("ddp silent", "resnet18"),
        "alone, gradients kept": Rival("alone", "resnet18", keep=True),
        "engine, gradients kept": Rival("", "resnet18", keep=True, wrapper=Silent),
    }
    for rival in rivals.values():
        rival.warm_up()
    taken: Times = {name: [] for name in rivals}
    cpu: Times = {name: [] for name in rivals}
    order = random.Random(7)
    if c.rank == 0:
        for _ in range(settings["rounds"]):
            for name in order.sample(sorted(rivals), len(rivals)):
                rivals[name].step()
                for _ in range(settings["counted"]):
                    started, before = time.perf_counter(), time.process_time()
                    rivals[name].step()
                    taken[name].append(time.perf_counter() - started)
                    cpu[name].append(time.process_time() - before)
    c.barrier().wait()
    for rival in rivals.values():
        rival.close()
    return {"times": taken, "cpu": cpu}


def overlap(c: comm.Communicator, links: Links, settings: dict[str, Any]) -> dict[str, Any]:
    """How much of communication is hidden: by backward where both take about as long, by forward too where it takes longer.

    For the former buckets are small: none can be sent before its last gradient is there, and the last one only after backward.
    """
    rows, order = [], random.Random(7)
    for ours, times_backward, options in _OVERLAPS:
        links.set(None)
        rivals = {each: Rival(each, settings["model"]) for each in ("alone", "ddp")}
        rivals |= {each: Rival(each, settings["model"], **options) for each in ours}
        for rival in rivals.values():
            rival.warm_up()
        _, costs = measure(c, rivals, 2, 3, order)
        # What all ranks compute alike from what they gathered.
        backward = max(c.all_gather_object(backward_seconds(rivals["alone"])))
        rate = round(costs[ours[0]]["bytes"] * 8 / (times_backward * backward * 1e6 * _PAYLOAD), 1)
        links.set(rate)
        tuning = tuned(c, settings["budget"], None)
        for rival in rivals.values():
            rival.follow(tuning)
        taken, costs = measure(c, rivals, settings["rounds"], settings["counted"], order)
        seconds = {each: statistics.median(times) for each, times in taken.items()}
        for name in ours:
            busy, waited = costs[name]["exchange"], costs[name]["wait"]
            shares = {"hidden": 1 - (seconds[name] - seconds["alone"]) / busy, "beside_backward": 1 - waited / busy}
            place = {"name": name, "rate_mbit": rate, "backward": backward, **options}
            rows.append({**place, "seconds": seconds, "exchange": busy, "wait": waited, **shares})
        if ours == ["allreduce"] and settings["trace"]:
            trace(c, settings, tuning)
        for rival in rivals.values():
            rival.close()
    return {"rows": rows}


def backward_seconds(rival: Rival) -> float:
    """The median seconds of backward alone."""
    taken = []
    for _ in range(7):
        loss = rival.loss()
        started = time.perf_counter()
        loss.backward()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def trace(c: comm.Communicator, settings: dict[str, Any], tuning: Tuning | None) -> None:
    """Writes rank 0's profile of three steps; exchanges are on a thread of their own."""
    rival = Rival("allreduce", settings["model"], bucket_bytes=_SMALL_BUCKETS)
    rival.warm_up()
    rival.follow(tuning)
    together(c)
    # Without this, threads that the profiler's own thread did not start are left out.
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=every) as profile:
        for _ in range(3):
            with torch.profiler.record_function("forward and backward"):
                rival.backward()
            with torch.profiler.record_function("optimizer"):
                rival.optimizer.step()
    if c.rank == 0:
        profile.export_chrome_trace(settings["trace"])
    rival.close()


PARTS = {"steps": steps, "engine": engine, "overlap": overlap}


def keep_to_own_cores(rank: int, size: int) -> None:
    """Restricts a host to its share of the processors.

    Otherwise the rank that is ahead would use the cores of the others, and all would wait for the last rank.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[rank % len(cores) :: size])


def main() -> None:
    settings = json.loads(sys.argv[1])
    if settings["part"] != "engine":
        keep_to_own_cores(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    c = comm.init(timeout=300)
    assert dist.is_initialized()
    told = PARTS[settings["part"]](c, Links(c, settings["links"]), settings)
    if c.rank == 0:
        print("RESULT", json.dumps(told), flush=True)
    comm.shutdown()


if __name__ == "__main__":
    main()
