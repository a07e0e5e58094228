"""Steps of several rivals in turns, on one rank of a training benchmark."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np

from bagua_kernels import comm
from bagua_kernels.comm import Tuning
from bench.network.rank import together
from bench.training.rivals import Rival

Times = dict[str, list[float]]

_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


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
            before |= host()
            for _ in range(counted):
                rival.step()
                moments[name].append(time.monotonic())
            after = host()
            # Neither messages nor a rank that is through may be in the way of others' steps.
            rival.conclude()
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


def host() -> dict[str, float]:
    """Processor seconds of this process, and bytes that have left its host."""
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
