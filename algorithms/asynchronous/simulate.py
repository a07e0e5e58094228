"""Recomputes a recorded run of `Wagma` in one process, and makes up records from the times that steps take."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from bagua_kernels.algorithms.asynchronous.order import Event
from bagua_kernels.algorithms.asynchronous.published_model import BRING, FORWARD, WRITE, PublishedModel, StaleRule
from bagua_kernels.algorithms.models.flat_parameters import FlatParameters
from bagua_kernels.comm.mailbox.clock import Clock, RealClock
from bagua_kernels.comm.mailbox.group_mean import mean_of_rows
from bagua_kernels.comm.mailbox.groups import Groups
from bagua_kernels.comm.mailbox.triggered import Execution

Loss = Callable[[torch.nn.Module, int, int], torch.Tensor]


@dataclass
class _Local:
    """What stands for a mailbox."""

    clock: Clock
    timeout: float = 1.0


class _Rank:
    """A rank whose events are taken one after the other."""

    def __init__(
        self,
        number: int,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        events: Sequence[Event],
        stale_rule: StaleRule,
    ) -> None:
        self.number, self.module, self.optimizer, self.events = number, module, optimizer, deque(events)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.flat = FlatParameters(trained)
        self.model = PublishedModel(self.flat, _Local(RealClock()), stale_rule)  # type: ignore[arg-type]
        self.read = self.model.buffers()
        self.offered: dict[int, list[torch.Tensor]] = {}
        self.passes = self.steps = 0
        self.received = -1

    def next_version(self) -> int:
        """The version for which the model is read now."""
        return next(event.execution.version for event in self.events if event.execution is not None)


@torch.no_grad()
def _receive(rank: _Rank, execution: Execution, ranks: Sequence[_Rank]) -> bool:
    """Executes a version on a rank if all members have read their models; returns False if one has not."""
    version, members = execution.version, [ranks[member] for member in execution.members]
    if any(version not in member.offered for member in members):
        return False
    means = rank.model.buffers()
    for index, mean in enumerate(means):
        mean_of_rows(torch.stack([member.offered[version][index] for member in members]), mean)
    rank.model.receive(execution, rank.offered[version], means)
    rank.received = version
    if all(member.received >= version for member in members):
        for member in members:
            del member.offered[version]
    return True


def replay(
    records: Sequence[Sequence[Event]],
    make: Callable[[int], tuple[torch.nn.Module, torch.optim.Optimizer]],
    loss: Loss,
    *,
    stale_rule: StaleRule = "conservative",
    after_step: Callable[[int, int, torch.nn.Module], None] | None = None,
) -> list[torch.nn.Module]:
    """Recomputes all ranks' models of a run, with the bits that they had there.

    Args:
        records: the events of each rank.
        make: makes a rank's module and optimizer as they were at the start; each rank's module is one of its own.
        loss: returns the loss of a rank's pass of this number, from 0; it is differentiated at once.
        stale_rule: as for `Wagma`.
        after_step: called with the rank, the number of the step, and the module.

    Returns:
        The modules at the end of the records.

    Raises:
        ValueError: the records do not belong together: a rank waits for one that never reads.
    """
    ranks = [_Rank(number, *make(number), events, stale_rule) for number, events in enumerate(records)]
    while any(rank.events for rank in ranks):
        before = sum(len(rank.events) for rank in ranks)
        for rank in ranks:
            while rank.events and _take(rank, ranks, loss, after_step):
                rank.events.popleft()
        if sum(len(rank.events) for rank in ranks) == before:
            stuck = {rank.number: rank.events[0] for rank in ranks if rank.events}
            raise ValueError(f"the records of these ranks do not belong together: next are {stuck}")
    return [rank.module for rank in ranks]


def _take(
    rank: _Rank, ranks: Sequence[_Rank], loss: Loss, after_step: Callable[[int, int, torch.nn.Module], None] | None
) -> bool:
    event = rank.events[0]
    if event.execution is not None:
        return _receive(rank, event.execution, ranks)
    if event.kind == "read":
        rank.model.read(rank.read)
        rank.offered[rank.next_version()] = [each.clone() for each in rank.read]
    elif event.kind == "step":
        rank.optimizer.step()
        rank.optimizer.zero_grad()
        rank.steps += 1
        if after_step is not None:
            after_step(rank.number, rank.steps - 1, rank.module)
    elif event == BRING:
        rank.model.bring_in()
    elif event == WRITE or event.kind in ("rest", "resume"):
        pass  # these stand between other events, and change nothing
    elif event == FORWARD:
        rank.model.bring_in()
        loss(rank.module, rank.number, rank.passes).backward()
        rank.passes += 1
    else:
        raise ValueError(f"expected an event of wagma, got {event}")
    return True


class _Arrivals:
    """Executes versions as ranks arrive, as if messages took no time."""

    def __init__(
        self, groups: Groups, period: int | None, activate: Literal["group", "all"], synchronous: bool
    ) -> None:
        self.size = groups.size
        self._synchronous = synchronous
        self._groups, self._period, self._activate = groups, period, activate
        self.next = [0] * self.size
        self.arrived = [-1] * self.size
        self.events: list[list[Event]] = [[] for _ in range(self.size)]

    def synchronises(self, version: int) -> bool:
        return self._period is not None and (version + 1) % self._period == 0

    def execute(self, version: int, rank: int) -> bool:
        """Executes a version for a rank's group; returns False if that waits for others' training."""
        synchronises = self.synchronises(version)
        members = tuple(range(self.size)) if synchronises else self._groups.of(version, rank)
        if (synchronises or self._synchronous) and min(self.arrived[member] for member in members) < version:
            return False
        for member in members:
            while self.next[member] < version:
                if not self.execute(self.next[member], member):
                    return False
        for member in members:
            self.events[member].append(Event("read"))
            contributed = self.arrived[member]
            execution = Execution(version, members, contributed, contributed == version)
            self.events[member].append(Event("receive", execution))
            self.next[member] = version + 1
        if self._activate == "all" and not synchronises:
            for other in range(self.size):
                while self.next[other] <= version and self.execute(self.next[other], other):
                    pass
        return True


def record(
    groups: Groups,
    period: int | None,
    seconds: Sequence[Sequence[float]],
    *,
    activate: Literal["group", "all"] = "group",
    synchronous: bool = False,
) -> list[list[Event]]:
    """Makes up the record of a run from the times that steps take, as if messages took no time.

    Args:
        groups: as for `Wagma`.
        period: as for `Wagma`.
        seconds: for each rank those of each step; all have as many.
        activate: as for `Wagma`.
        synchronous: True if all members of a group wait for each other's training, as synchronous algorithms do.

    Returns:
        The events of each rank, for `replay`.
    """
    arrivals = _Arrivals(groups, period, activate, synchronous)
    steps = len(seconds[0])
    queue = [(float(seconds[rank][0]), rank) for rank in range(groups.size)]
    for events in arrivals.events:
        events.append(FORWARD)
    heapq.heapify(queue)
    waiting: dict[int, int] = {}
    while queue:
        now = queue[0][0]
        # Who comes at the same time has come before anything is executed.
        while queue and queue[0][0] == now:
            _, rank = heapq.heappop(queue)
            arrivals.events[rank] += [BRING, WRITE, Event("step")]
            arrivals.arrived[rank] += 1
            waiting[rank] = arrivals.arrived[rank]
        # An arrival may be what others wait for.
        for other, awaited in sorted(waiting.items()):
            if arrivals.next[other] <= awaited:
                arrivals.execute(awaited, other)
        for other in [each for each, awaited in sorted(waiting.items()) if arrivals.next[each] > awaited]:
            done = waiting.pop(other) + 1
            arrivals.events[other].append(FORWARD if done < steps else BRING)
            if done < steps:
                heapq.heappush(queue, (now + float(seconds[other][done]), other))
    return arrivals.events
