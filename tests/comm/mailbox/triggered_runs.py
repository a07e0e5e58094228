"""Runs of `TriggeredAverage` among threads, with models in which every error shows: integers modulo a prime."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bagua_kernels.comm import Communicator, Schedule, open_mailbox
from bagua_kernels.comm.mailbox.courier import Courier
from bagua_kernels.comm.mailbox.group_mean import group_mean
from bagua_kernels.comm.mailbox.groups import Butterfly, Groups, Shuffled, Whole
from bagua_kernels.comm.mailbox.triggered import Execution, TriggeredAverage

PRIME = 2**31 - 1  # division by the number of members is exact modulo a prime
ELEMENTS = 7


def exact_mean(rows: torch.Tensor, out: torch.Tensor) -> None:
    """The sum of rows times the inverse of their number, modulo the prime."""
    out.copy_(rows.sum(0) % PRIME * pow(len(rows), -1, PRIME) % PRIME)


class Model:
    """Integers, of which all elements are equal whenever nobody is in the middle of writing."""

    def __init__(self, courier: Courier, start: int, pause: Callable[[], None] = lambda: None) -> None:
        self._changed = courier.mailbox.clock.condition()
        self._pause = pause
        self.x = torch.full((ELEMENTS,), start, dtype=torch.int64)
        self.debt = torch.zeros(ELEMENTS, dtype=torch.int64)
        self.replacement: torch.Tensor | None = None
        self.version = -1
        self._writing = self._resting = False

    def buffers(self) -> list[torch.Tensor]:
        return [torch.empty_like(self.x)]

    def read(self, out: Sequence[torch.Tensor]) -> tuple[int, bool]:
        with self._changed:
            while self._writing:
                self._changed.wait(1.0)
            out[0].copy_(self.value())
            return self.version, self._resting

    def rest(self, resting: bool) -> None:
        with self._changed:
            self._resting = resting

    def value(self) -> torch.Tensor:
        return ((self.x if self.replacement is None else self.replacement) + self.debt) % PRIME

    def receive(self, execution: Execution, read: Sequence[torch.Tensor], mean: Sequence[torch.Tensor]) -> None:
        assert (mean[0] == mean[0][0]).all(), f"a torn read: {mean[0]}"
        with self._changed:
            if execution.fresh:
                self.replacement, self.debt = mean[0].clone(), torch.zeros_like(self.debt)
            else:
                self.debt = (self.debt + mean[0] - read[0]) % PRIME

    def owe(self, difference: Sequence[torch.Tensor]) -> None:
        assert (difference[0] == difference[0][0]).all(), f"a torn read: {difference[0]}"
        with self._changed:
            self.debt = (self.debt + difference[0]) % PRIME

    def bring_in(self) -> None:
        with self._changed:
            self.x, self.replacement, self.debt = self.value(), None, torch.zeros_like(self.debt)

    def step(self, update: int) -> None:
        with self._changed:
            self._writing = True
        for i in range(ELEMENTS):
            self.x[i] = (self.x[i] + update) % PRIME
            if i == ELEMENTS // 2:
                self._pause()
        with self._changed:
            self._writing = False
            self._changed.notify_all()

    def publish(self, version: int) -> None:
        with self._changed:
            self.version = version


@dataclass
class Case:
    """What a run is made of."""

    seed: int
    size: int
    groups: Groups
    period: int | None
    activate: str
    steps: list[int]  # of each rank
    pace: list[float]  # seconds of a step, of each rank
    asleep: dict[tuple[int, int], float] = field(default_factory=dict)  # (rank, step): seconds
    latency: float = 0.0

    @classmethod
    def draw(cls, seed: int) -> Case:
        draws = random.Random(seed)
        size = draws.randint(2, 8)
        group = draws.randint(2, min(4, size))
        kinds: list[Groups] = [Whole(size), Shuffled(size, group, seed), Shuffled(size, group, seed)]
        if size in (4, 8):
            kinds += [Butterfly(size, draws.choice([2, 4]))] * 3
        elif size == 2:
            kinds.append(Butterfly(2, 2))
        period = draws.choice([3, 5, 10, None])
        steps = draws.choice([12, 25])
        different = draws.random() < 0.4
        pace = [draws.choice([1.0, 1.0, 1.0, 3.0]) if draws.random() < 0.5 else 1.0 for _ in range(size)]
        asleep = {(draws.randrange(size), draws.randrange(steps)): 5.5 for _ in range(draws.randint(0, 2))}
        return cls(
            seed,
            size,
            draws.choice(kinds),
            period,
            draws.choice(["group", "group", "all"]),
            [draws.randint(1, steps) if different else steps for _ in range(size)],
            pace,
            asleep,
            draws.choice([0.0, 0.5, 3.0]),
        )


@dataclass
class Result:
    """Of one rank."""

    executions: list[Execution]
    own: list[int]  # what it added in each step
    value: torch.Tensor
    longest: int  # last version
    synchronised: dict[int, torch.Tensor]


Sleep = Callable[[float], None]


def rank(communicator: Communicator, case: Case, sleep: Sleep, pause: Callable[[], None], make: Any = Model) -> Result:
    """Trains one rank."""
    draws = random.Random(f"{case.seed} {communicator.rank}")
    me = communicator.rank
    case.groups.check(communicator)
    courier = Courier(open_mailbox(communicator))
    model = make(courier, draws.randrange(PRIME), pause)
    executions: list[Execution] = []
    own, synchronised = [int(model.x[0])], {}

    def executed(execution: Execution) -> None:
        executions.append(execution)
        if average.synchronises(execution.version):
            # On the courier's thread: by the time that this rank trains on, others may have started the next version.
            synchronised[execution.version] = model.value()

    average = TriggeredAverage(
        courier,
        case.groups,
        case.period,
        model,
        activate=case.activate,  # type: ignore[arg-type]
        group_mean=lambda members, _, x, number: group_mean(courier.mailbox, members, x, number, mean=exact_mean),
        on_execution=executed,
    )
    courier.start()
    for version in range(case.steps[me]):
        sleep(case.pace[me] * draws.uniform(0.9, 1.1) + case.asleep.get((me, version), 0.0))
        update = draws.randrange(PRIME)
        model.step(update)
        own.append(update)
        model.publish(version)
        average.arrive(version)
        average.wait(version)
        model.bring_in()
    last = average.rest()
    model.bring_in()
    communicator.barrier().wait()
    courier.end()
    return Result(executions, own, model.x, last, synchronised)


def check(case: Case, results: list[Result]) -> None:
    """Asserts what holds for any order of events."""
    total = sum(sum(result.own) for result in results) % PRIME
    assert int(sum(int(result.value[0]) for result in results) % PRIME) == total, "the sum is not conserved"
    assert all((result.value == result.value[0]).all() for result in results)
    assert len({result.longest for result in results}) == 1
    assert results[0].longest == max(case.steps) - 1
    for result in results:
        assert [each.version for each in result.executions] == list(range(max(case.steps)))
    for version in range(max(case.steps)):
        lines = [result.executions[version] for result in results]
        for me, line in enumerate(lines):
            assert me in line.members
            assert all(lines[peer].members == line.members for peer in line.members)
    for version, value in results[0].synchronised.items():
        assert all(torch.equal(result.synchronised[version], value) for result in results)
    if case.period is not None and len({*case.steps}) == 1:
        assert max(line.staleness for result in results for line in result.executions) <= case.period - 1


def scheduled(case: Case, make: Any = Model) -> tuple[Schedule, list[Result]]:
    """Runs a case by a virtual clock."""
    from bagua_kernels.comm import run_ranks

    schedule = Schedule(case.seed, latency=lambda draws: draws.uniform(0, case.latency))
    results = run_ranks(case.size, rank, case, schedule.sleep, schedule.pass_on, make, timeout=300.0, schedule=schedule)
    return schedule, results
