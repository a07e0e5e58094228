"""The trainings in plain PyTorch, in float64: a network for each rank, and what the pages say of exchanges.

Ranks are generators. Each yields what it brings to a round, and is sent what all have brought.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.algorithms.meetings.rows import ROWS, Row
from tests.algorithms.meetings.trainings import (
    SETTLING,
    Net,
    Training,
    batch,
    loss_of,
    make_optimizer,
    values,
    written,
)

Everyone = list[torch.Tensor | None]
Rounds = Generator[torch.Tensor | None, Everyone, None]


@dataclass
class Simulated:
    """What a network of each rank comes to.

    Attributes:
        seen: of each rank, at the first pass of each step.
        last: of each rank, after its last step.
        mean: after `synchronize`, or that of a rank which has trained until the end.
    """

    seen: list[list[torch.Tensor]]
    last: list[torch.Tensor]
    mean: torch.Tensor


def simulate(training: Training, number: int) -> Simulated:
    """Trains one of the networks."""
    ranks = [_Rank(training, number, rank) for rank in range(training.ranks)]
    running = [rank.run() for rank in ranks]
    brought: Everyone = [next(each) for each in running]
    while not all(rank.idle for rank in ranks):
        switching = [rank.switching for rank in ranks]
        assert all(switching) or not any(switching), "ranks switch in different rounds"
        everyone = list(brought)
        brought = [each.send(everyone) for each in running]
    last = [values(rank.net) for rank in ranks]
    if training.rows[-1].family == "mean":
        mean = last[int(np.argmax(training.batches))]
    else:
        mean = torch.stack([rank.rule.source() for rank in ranks]).mean(0)
    return Simulated([rank.net.seen for rank in ranks], last, mean)


@dataclass
class _Rank:
    training: Training
    number: int
    rank: int
    idle: bool = False
    switching: bool = False
    net: Net = field(init=False)

    def __post_init__(self) -> None:
        self.net = Net(self.training.seed + self.number, self.training.frozen, torch.float64)
        self.optimizer = make_optimizer(self.training, self.net)
        self.rule = rule_of(self.training.kind, self)

    def run(self) -> Rounds:
        training = self.training
        for step in range(training.batches[self.rank]):
            for event in training.events:
                if event.step == step and not event.middle and event.rank in (None, self.rank):
                    if event.waits or event.kind in SETTLING:
                        self.rule.settle()
                    yield from self.happen(event.kind, event.row)
            self.net.watched = True
            overflows = (step, self.rank, self.number) in training.overflows
            left_out = (step, self.rank) in training.left_out
            self.optimizer.zero_grad()
            for micro in range(training.micro):
                x = batch(training, step, micro, self.rank, self.number)
                loss = loss_of(self.net, x.to(training.dtype).double())
                (loss * float("inf") if overflows and micro == 0 else loss).backward()
            if left_out:
                if training.kind.family == "local":
                    continue
                self.optimizer.zero_grad()
            yield from self.rule.step(takes=not left_out)
            if training.clamp:
                with torch.no_grad():
                    for parameter in self.net.parameters():
                        parameter.clamp_(-training.clamp, training.clamp)
        self.idle = True
        while True:
            yield from self.rule.rest()

    def happen(self, kind: str, row: str) -> Rounds:
        if kind == "load":
            self.rule.settle()
            self.net.load_state_dict(written(self.training, self.number).state_dict())
            self.rule.written()
        elif kind == "wait":
            self.rule.settle()
        elif kind == "switch":
            self.switching = True
            self.rule.settle()
            everyone = yield self.rule.source()
            self.put(mean_of(everyone))
            # The optimizer's state becomes rank 0's.
            state = flat_state(self.optimizer)
            first = (yield state)[0]
            assert first is not None
            put_state(self.optimizer, first)
            self.switching = False
            steps = self.rule.steps
            self.rule = rule_of(ROWS[row], self)
            self.rule.steps = steps

    def put(self, vector: torch.Tensor) -> None:
        trained = [p for p in self.net.parameters() if p.requires_grad]
        for parameter, part in zip(trained, vector.split([p.numel() for p in trained]), strict=True):
            parameter.data.copy_(part.view(parameter.shape))

    def take(self) -> bool:
        """Clips, and takes the optimizer's step; returns False if it is left out."""
        trained = [p for p in self.net.parameters() if p.requires_grad]
        if not all(p.grad is not None and bool(p.grad.isfinite().all()) for p in trained):
            return False
        if self.training.clips:
            torch.nn.utils.clip_grad_norm_(trained, 0.3)
        self.optimizer.step()
        return True


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors of an optimizer's state, in an order."""
    found = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    return [each[key] for each in found for key in sorted(each) if isinstance(each[key], torch.Tensor)]


def flat_state(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return torch.cat([torch.zeros(0), *(each.double().reshape(-1) for each in state_tensors(optimizer))]).clone()


def put_state(optimizer: torch.optim.Optimizer, vector: torch.Tensor) -> None:
    tensors = state_tensors(optimizer)
    for tensor, part in zip(tensors, vector.split([each.numel() for each in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def mean_of(everyone: Sequence[torch.Tensor | None]) -> torch.Tensor:
    return torch.stack([each for each in everyone if each is not None]).mean(0)


class _Rule:
    """What an algorithm does on a rank."""

    def __init__(self, row: Row, rank: _Rank) -> None:
        self.row, self.rank = row, rank
        self.steps = self.rounds = 0
        self.weights = row.matrix(rank.training.ranks, rank.training.nodes)
        self.start()

    @property
    def x(self) -> torch.Tensor:
        return values(self.rank.net)

    def number(self, name: str, default: Any) -> Any:
        return self.row.numbers.get(name, default)

    def mixed(self, everyone: Sequence[torch.Tensor | None]) -> torch.Tensor:
        assert self.weights is not None
        rows = torch.stack([each for each in everyone if each is not None])
        return torch.from_numpy(self.weights[self.rank.rank]) @ rows

    def start(self) -> None:
        """Begins from parameters that all ranks have."""

    def settle(self) -> None:
        """Puts what is under way in place."""

    def written(self) -> None:
        """Follows parameters that were written."""

    def source(self) -> torch.Tensor:
        """What has the mean of all models."""
        self.settle()
        return self.x

    def step(self, takes: bool) -> Rounds:
        raise NotImplementedError

    def rest(self) -> Rounds:
        """Takes part in a round of others."""
        yield from self.step(takes=False)


class _Mean(_Rule):
    def step(self, takes: bool) -> Rounds:
        trained = [p for p in self.rank.net.parameters() if p.requires_grad]
        everyone = yield torch.cat([p.grad.reshape(-1) for p in trained if p.grad is not None])
        mean = mean_of(everyone)
        for parameter, part in zip(trained, mean.split([p.numel() for p in trained]), strict=True):
            parameter.grad = part.view(parameter.shape).clone()
        training = self.rank.training
        # Each pass that exchanges gradients counts.
        self.steps += 1 if training.no_sync else training.micro
        self.rank.take()

    def rest(self) -> Rounds:
        yield None


class _Gossip(_Rule):
    """One round for each step, or for some."""

    def step(self, takes: bool) -> Rounds:
        interval = self.row.options.get("interval", 1)
        meets = (self.steps + 1) % interval == 0
        self.steps += 1
        yield from self.before(meets)
        if takes:
            self.rank.take()
        if meets:
            yield from self.round()

    def before(self, meets: bool) -> Rounds:
        yield from ()

    def round(self) -> Rounds:
        yield from ()


class _DPSGD(_Gossip):
    def before(self, meets: bool) -> Rounds:
        if meets:
            everyone = yield self.x
            self.rank.put(self.mixed(everyone))


class _D2(_Gossip):
    def start(self) -> None:
        self.correction = torch.zeros_like(self.x)

    def round(self) -> Rounds:
        after = self.x
        everyone = yield after - self.correction
        mixed = self.mixed(everyone)
        self.correction = after - mixed
        self.rank.put(mixed)


class _Push(_Gossip):
    def start(self) -> None:
        self.numerator, self.weight = self.x, torch.ones(1, dtype=torch.float64)

    def written(self) -> None:
        self.numerator = self.x * self.weight

    def round(self) -> Rounds:
        numerator = self.numerator + self.x - self.numerator / self.weight
        everyone = yield torch.cat([numerator, self.weight])
        mixed = self.mixed(everyone)
        self.numerator, self.weight = mixed[:-1], mixed[-1:]
        self.rank.put(self.numerator / self.weight)

    def source(self) -> torch.Tensor:
        return self.numerator + (self.x - self.numerator / self.weight)


class _DCD(_Gossip):
    def start(self) -> None:
        self.own = self.x

    def round(self) -> Rounds:
        after = self.x
        everyone = yield self.own
        self.own = self.mixed(everyone) + after - self.own
        self.rank.put(self.own)


class _Choco(_Gossip):
    def start(self) -> None:
        self.own, self.gap = self.x, torch.zeros_like(self.x)

    def round(self) -> Rounds:
        after = self.x
        sent = after - self.own
        everyone = yield sent
        self.own = after
        self.gap = self.gap + self.mixed(everyone) - sent
        self.rank.put(after + self.number("eta", 1.0) * self.gap)


class _Outer(_Rule):
    def start(self) -> None:
        self.outer, self.momentum = self.x, torch.zeros_like(self.x)
        self.flight: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def written(self) -> None:
        self.outer = self.x

    def meets(self) -> bool:
        interval, first = self.number("interval", 1), self.number("first", 0)
        return self.steps <= first or (self.steps - first) % interval == 0

    def step(self, takes: bool) -> Rounds:
        # A step that is left out does not count.
        if not self.rank.take():
            return
        self.steps += 1
        if self.flight is not None and (self.steps > self.flight[0] or self.meets()):
            self.settle()
        if self.meets():
            yield from self.rest()
        if self.flight is not None and self.steps >= self.flight[0]:
            self.settle()

    def rest(self) -> Rounds:
        self.settle()
        x = self.x
        everyone = yield self.outer - x
        self.flight = self.steps + self.number("delay", 0), x, mean_of(everyone)
        if self.rank.idle:
            self.settle()

    def settle(self) -> None:
        if self.flight is None:
            return
        (_, sent, d), self.flight = self.flight, None
        self.outer_step(d)
        blend = self.number("blend", None)
        x = self.x
        self.rank.put(self.outer + x - sent if blend is None else blend * x + (1 - blend) * self.outer)

    def outer_step(self, d: torch.Tensor) -> None:
        mu = self.number("momentum", 0.0)
        self.momentum = mu * self.momentum + d
        self.outer = self.outer - self.number("lr", 1.0) * (d + mu * self.momentum)


class _Slow(_Outer):
    def outer_step(self, d: torch.Tensor) -> None:
        # Learning rates do not change.
        self.momentum = self.number("momentum", 0.5) * self.momentum + d
        self.outer = self.outer - self.momentum


RULES: dict[str, type[_Rule]] = {
    "mean": _Mean,
    "dpsgd": _DPSGD,
    "d2": _D2,
    "push": _Push,
    "dcd": _DCD,
    "choco": _Choco,
    "outer": _Outer,
    "slow": _Slow,
}


def rule_of(row: Row, rank: _Rank) -> _Rule:
    return RULES[row.rule](row, rank)
