"""What a tuner measures in the first steps, the same on all ranks afterwards."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bagua_kernels.algorithms.choosing.cost.facts import Job, Machine, Network
from bagua_kernels.comm import Communicator, ReduceOp
from bagua_kernels.compression import from_spec

_ELEMENTS = 1 << 18  # that a codec is timed on
_REPEATS = 3
_PASSES = 3  # over a matrix by thin factors


@dataclass(frozen=True)
class Facts:
    """Measurements of the slowest rank, in seconds where no unit is given.

    Attributes:
        step: of a step with plain means.
        waited: of it, for communication.
        exchange: that communication threads were busy in a step.
        sent: bytes of a step.
        latency: of a message, one way.
        codecs: of an element that a codec encodes and decodes, by its name.
        pass_over: of an element that is read and written once.
    """

    step: float
    waited: float
    exchange: float
    sent: float
    latency: float
    codecs: Mapping[str, float]
    pass_over: float

    def problem(self, matrices: Sequence[tuple[int, int]], elements: int, ranks: int) -> tuple[Job, Machine, Network]:
        """What the cost model is asked."""
        alone = max(self.step - self.waited, 1e-9)
        # A plain step lasts as long as the exchanges and what happens before the first and after the last.
        exposed = min(1.0, max(0.1, (self.step - self.exchange) / alone))
        machine = Machine(exposed, 0.0, dict(self.codecs), _PASSES * self.pass_over)
        network = Network(ranks, 8 * self.sent / max(self.exchange, 1e-9), self.latency)
        return Job(alone, tuple(matrices), elements), machine, network

    def with_bandwidth(self, factor: float) -> Facts:
        """The facts after bytes have become slower by a factor."""
        busy = self.exchange * factor
        hidden = max(0.0, self.exchange - self.waited)
        waited = max(0.0, busy - hidden)
        return replace(self, exchange=busy, waited=waited, step=self.step - self.waited + waited)


def latency(communicator: Communicator) -> float:
    """Seconds of a message one way: half of the shortest of some sums of one number; collective."""
    return _shortest_sum(communicator, 1) / 2


def pace(communicator: Communicator) -> float:
    """Seconds of a byte that a rank sends, without latency: of a sum of 256 KiB and one of one number; collective."""
    elements = _ELEMENTS // 4
    taken = _shortest_sum(communicator, elements) - _shortest_sum(communicator, 1)
    return max(taken, 1e-6) / (4 * elements * 2 * (communicator.size - 1) / communicator.size)


def sending(communicator: Communicator, facts: Facts) -> float:
    """Seconds that a step with exact means needs on the wire; collective.

    If they are few, the network does not matter.
    """
    return greatest(communicator, [pace(communicator) * facts.sent])[0]


def _shortest_sum(communicator: Communicator, elements: int) -> float:
    x, taken = torch.zeros(elements, device=communicator.device), []
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        communicator.all_reduce(x).wait()
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def codec_seconds(specs: Iterable[str], device: torch.device) -> dict[str, float]:
    """Seconds of an element that each codec encodes and decodes here, by the codec's name."""
    x = torch.randn(_ELEMENTS, device=device, generator=torch.Generator(device).manual_seed(0))
    out, found = torch.empty_like(x), {}
    for spec in specs:
        codec = from_spec(spec)
        found[spec.split(":")[0]] = _seconds(lambda codec=codec: codec.decode(codec.encode(x, seed=0), out), device)
    return found


def pass_seconds(device: torch.device) -> float:
    """Seconds of an element that is read and written."""
    x = torch.zeros(4 * _ELEMENTS, device=device)
    out = torch.empty_like(x)
    return _seconds(lambda: out.copy_(x), device) / 4


def _seconds(run: Any, device: torch.device) -> float:
    taken = []
    # The first one compiles.
    for _ in range(_REPEATS + 1):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:]) / _ELEMENTS


def greatest(communicator: Communicator, values: Sequence[float]) -> list[float]:
    """The greatest of all ranks' values, place by place; collective."""
    # waits: a measurement at start.
    found = torch.tensor(values, dtype=torch.float64, device=communicator.device)
    communicator.all_reduce(found, ReduceOp.MAX).wait()
    # waits: a measurement at start.
    return found.tolist()


def slowest(everyone: Sequence[Facts]) -> Facts:
    """One set of facts of all ranks': the greatest of each."""
    found: dict[str, Any] = {
        name: max(getattr(one, name) for one in everyone)
        for name in ("step", "waited", "exchange", "sent", "latency", "pass_over")
    }
    codecs = {name: max(one.codecs[name] for one in everyone) for name in everyone[0].codecs}
    return Facts(codecs=codecs, **found)
