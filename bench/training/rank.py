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
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client
from typing import Any

import torch
import torch.distributed as dist

from bagua_kernels import comm
from bagua_kernels.algorithms.choosing.cost.facts import FRAME
from bagua_kernels.comm import Tuning
from bench.network.rank import together
from bench.training import activation, asynchronous, choice, local_steps
from bench.training.rivals import HEALS, Rival, Silent
from bench.training.turns import Times, measure, tuned

_SMALL_BUCKETS = 1 << 20
# Rivals, how many times as long as backward their bytes take on the wire, and their options.
_OVERLAPS: list[tuple[list[str], float, dict[str, Any]]] = [
    (["allreduce"], 1.0, {"bucket_bytes": _SMALL_BUCKETS}),
    (["bytegrad"], 1.0, {"bucket_bytes": _SMALL_BUCKETS}),
    (["allreduce in backward"], 1.75, {}),
]


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


Part = Callable[[comm.Communicator, Links, dict[str, Any]], dict[str, Any]]


def steps(c: comm.Communicator, links: Links, settings: dict[str, Any]) -> dict[str, Any]:
    """All rates for all groups of rivals. Not all rivals at once: four ranks' copies would not fit into the memory."""
    order, rows, tunings = random.Random(7), [], dict(settings["tunings"])
    heals = any(name.endswith(HEALS) for group, _ in settings["groups"] for name in group)
    members = comm.Membership(c.duplicate()) if heals else None
    for group, rates in settings["groups"]:
        # Unlimited, for parameters are broadcast when a rival is made.
        links.set(None)
        rivals = {name: Rival(name, settings["model"], members=members) for name in group}
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
    if members is not None:
        members.prepare_close()
        c.barrier().wait()
        members.close()
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
        rate = round(costs[ours[0]]["bytes"] * 8 / (times_backward * backward * 1e6 * FRAME), 1)
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


PARTS: Mapping[str, Part] = {
    "steps": steps,
    "engine": engine,
    "overlap": overlap,
    "local": local_steps.on_rank,
    "asynchronous": asynchronous.on_rank,
    "activation": activation.on_rank,
    "choice": choice.on_rank,
    "drift": choice.drift_on_rank,
}


def keep_to_own_cores(rank: int, size: int) -> None:
    """Restricts a host to its share of the processors.

    Otherwise the rank that is ahead would use the cores of the others, and all would wait for the last rank.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[rank % len(cores) :: size])


def main(parts: Mapping[str, Part] = PARTS) -> None:
    """Runs the part that the settings name, and prints what it returns on rank 0."""
    settings = json.loads(sys.argv[1])
    if settings["part"] != "engine":
        keep_to_own_cores(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    c = comm.init(timeout=300)
    assert dist.is_initialized()
    told = parts[settings["part"]](c, Links(c, settings["links"]), settings)
    if c.rank == 0:
        print("RESULT", json.dumps(told), flush=True)
    comm.shutdown()


if __name__ == "__main__":
    main()
