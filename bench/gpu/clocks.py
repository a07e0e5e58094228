"""Times calls on the host and on the GPU, in turns."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Run = Callable[[], object]
# The GPU waits while calls are launched, so that launches cost no time between the events. A clock of 2 GHz is assumed.
CYCLES_PER_SECOND = 2e9
LEAST_WAIT, MOST_WAIT = 2e-3, 0.2


class Clock:
    """Measures on one device; a CPU has one time, which counts as both."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        # Larger than the second-level cache of any GPU so far.
        self._flushed = torch.empty(1 << 28 if self._on_gpu else 1, dtype=torch.uint8, device=device)
        if self._on_gpu:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def host(self, run: Run) -> float:
        """Seconds that the host spends in a call."""
        self.synchronize()
        start = time.perf_counter()
        run()
        taken = time.perf_counter() - start
        self.synchronize()
        return taken

    def gpu(self, run: Run, host: float) -> float:
        """Seconds of GPU time of a call from a cold cache; `host` is about the time that its launches take."""
        if not self._on_gpu:
            return self.host(run)
        self._flushed.zero_()
        wait = min(MOST_WAIT, max(LEAST_WAIT, 2 * host))
        torch.cuda._sleep(int(wait * CYCLES_PER_SECOND))
        self._events[0].record()
        run()
        self._events[1].record()
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3

    def synchronize(self) -> None:
        """Waits for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()


def medians(clock: Clock, runs: Sequence[Run], rounds: int, warmup: int = 3) -> list[tuple[float, float]]:
    """The median times of calls that take turns, in another order in each round: (host seconds, GPU seconds)."""
    order = random.Random(0)
    for _ in range(warmup):
        for run in runs:
            run()
    host: list[list[float]] = [[] for _ in runs]
    gpu: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for index in order.sample(range(len(runs)), len(runs)):
            host[index].append(clock.host(runs[index]))
            gpu[index].append(clock.gpu(runs[index], statistics.median(host[index])))
    return [(statistics.median(a), statistics.median(b)) for a, b in zip(host, gpu, strict=True)]
