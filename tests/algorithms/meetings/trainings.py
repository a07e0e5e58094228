"""Trainings in which features meet, as a user would write them, and what a rank ends with."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bagua_kernels.algorithms import Algorithm, ModelAlgorithm
from bagua_kernels.comm import Communicator
from tests.algorithms.meetings.rows import ROWS, Row
from tests.algorithms.ranks import fill

WIDTH = 4
SAMPLES = 3
RATES = {"sgd": 0.1, "momentum": 0.05, "adamw": 0.01, "muon": 0.02}
# What changes nothing: a training with it has the bits of one without.
NEUTRAL = (
    "swap",
    "data",
    "apply",
    "unflatten",
    "consensus",
    "averaged",
    "stats",
    "save",
    "reload",
    "resume",
    "copy",
    "pickle",
    "evaluate",
    "keep",
    "optimizer",
    "scaler",
)
# Of these, what may stand between a forward and its backward pass.
MIDDLE = ("consensus", "averaged", "stats", "evaluate", "copy")
# What all ranks call.
COLLECTIVE = ("consensus", "averaged", "save", "reload", "resume")
# What puts an exchange under way in place.
SETTLING = ("consensus", "averaged", "save", "reload", "resume")


@dataclass(frozen=True)
class Event:
    """Something beside the steps of a training.

    Attributes:
        step: before which it takes place, or in which.
        kind: one of `NEUTRAL`, "load" or "switch".
        middle: True if it takes place between a forward and its backward pass.
        rank: the only rank on which it does; None for all.
        waits: True to call `wait` before.
        row: of "switch".
    """

    step: int
    kind: str
    middle: bool = False
    rank: int | None = None
    waits: bool = False
    row: str = ""


@dataclass(frozen=True)
class Training:
    """A training.

    Attributes:
        row: key of `ROWS`.
        ranks: how many.
        batches: of each rank.
        seed: of parameters and data.
        micro: backward passes in a step.
        no_sync: True if all of these but the last are within `no_sync`.
        clips: True to clip the gradients' norm.
        frozen: True if a layer is frozen.
        nets: trained at the same time, with a wrapper and an optimizer each.
        scaler: "own" if each network has one, "shared" if they share one, or "".
        overflows: (step, rank, network) of losses that overflow.
        left_out: (step, rank) of batches that are left out.
        zeros: True if gradients are set to zero instead of None.
        clamp: bound of all parameters after each step; 0 for none.
        optimizer: key of `RATES`.
        still: True for a learning rate of 0.
        events: in the order in which they take place.
        nodes: the ranks of each node; empty for one rank on each.
    """

    row: str
    ranks: int = 2
    batches: tuple[int, ...] = (5, 5)
    seed: int = 0
    micro: int = 1
    no_sync: bool = False
    clips: bool = False
    frozen: bool = False
    nets: int = 1
    scaler: str = ""
    overflows: frozenset[tuple[int, int, int]] = frozenset()
    left_out: frozenset[tuple[int, int]] = frozenset()
    zeros: bool = False
    clamp: float = 0.0
    optimizer: str = "sgd"
    still: bool = False
    events: tuple[Event, ...] = ()
    nodes: tuple[tuple[int, ...], ...] = ()

    @property
    def kind(self) -> Row:
        return ROWS[self.row]

    @property
    def rows(self) -> list[Row]:
        """All that are used, in order."""
        return [self.kind, *(ROWS[e.row] for e in self.events if e.kind == "switch")]

    @property
    def uneven(self) -> bool:
        return len(set(self.batches)) > 1

    @property
    def rate(self) -> float:
        return 0.0 if self.still else RATES[self.optimizer]

    @property
    def has_switch(self) -> bool:
        return len(self.rows) > 1

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if any(row.dtype == torch.float32 for row in self.rows) else torch.float64

    def without_neutral(self) -> Training:
        """The training in which nothing happens that should change nothing, but for what settles an exchange."""
        events = []
        for event in self.events:
            if event.kind in ("resume", "reload"):
                events.append(Event(event.step, "save"))
            elif event.kind not in NEUTRAL:
                events.append(event)
            elif (event.kind in SETTLING or event.waits) and not event.middle:
                events.append(Event(event.step, "wait", rank=event.rank))
        kept = (
            tuple(events)
            if any(row.delays for row in self.rows)
            else tuple(e for e in events if e.kind not in ("wait", "save"))
        )
        return Training(**{**vars(self), "events": kept, "zeros": False})


class Net(nn.Module):
    """Layers of fewer elements than any algorithm compresses by default.

    Attributes:
        seen: trainable parameters, as the forward passes of training have found them.
    """

    def __init__(self, seed: int, frozen: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 6)
        self.second = nn.Linear(6, 3, bias=False)
        self.scale = nn.Parameter(torch.zeros(()))
        fill(self, seed)
        self.to(dtype)
        if frozen:
            self.first.requires_grad_(False)
        self.watched = False
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.watched:
            self.seen.append(values(self))
            self.watched = False
        return self.second(torch.tanh(self.first(x))) * (1 + self.scale) + 0.5


def values(net: nn.Module) -> torch.Tensor:
    """All trainable parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in net.parameters() if p.requires_grad]).clone()


def written(training: Training, number: int) -> Net:
    """The network whose state is loaded."""
    return Net(1000 + training.seed + number, training.frozen, training.dtype)


def batch(training: Training, step: int, micro: int, rank: int, number: int) -> torch.Tensor:
    seed = (((training.seed * 101 + step) * 3 + micro) * 5 + rank) * 2 + number
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x).square().mean()
    return found


def make_optimizer(training: Training, net: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in net.parameters() if p.requires_grad]
    if training.optimizer == "momentum":
        return torch.optim.SGD(trained, lr=training.rate, momentum=0.8)
    if training.optimizer == "adamw":
        # So large a denominator that rounding of a gradient near zero does not become a step.
        return torch.optim.AdamW(trained, lr=training.rate, eps=1e-2)
    if training.optimizer == "muon":
        from bagua_kernels.optim import muon_with_adamw

        return muon_with_adamw(net, lr=training.rate, adamw_lr=training.rate)
    return torch.optim.SGD(trained, lr=training.rate)


@dataclass
class Outcome:
    """What a rank ends with, a value for each network.

    Attributes:
        seen: trainable parameters that the first pass of each step has found.
        last: those after the last step.
        mean: those after `synchronize`, or `last` of algorithms on gradients.
        moved: where the rank's own steps alone would have led it from what all ranks had in common.
        steps: as `stats` counts them.
        problems: what was wrong on the way.
    """

    seen: list[list[torch.Tensor]]
    last: list[torch.Tensor]
    mean: list[torch.Tensor]
    moved: list[torch.Tensor]
    steps: list[int]
    problems: list[str] = field(default_factory=list)


class Loop:
    """A rank's training loop."""

    def __init__(self, communicator: Communicator, training: Training) -> None:
        self.communicator, self.training, self.rank = communicator, training, communicator.rank
        self.row = training.kind
        self.nets = [Net(training.seed + n, training.frozen, training.dtype) for n in range(training.nets)]
        self.problems: list[str] = []
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.make()
        self.moved = [values(net).double() for net in self.nets]
        self.after: list[torch.Tensor] = []

    def make(self, states: list[dict[str, Any]] | None = None) -> None:
        """Makes optimizers, scalers and wrappers; of saved ones, if any."""
        training = self.training
        self.optimizers = [make_optimizer(training, net) for net in self.nets]
        if states:
            for optimizer, state in zip(self.optimizers, states, strict=True):
                if not self.row.own_optimizer:
                    optimizer.load_state_dict(state)
        self.scalers: list[torch.amp.GradScaler | None] = [None] * training.nets
        if training.scaler:
            made = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10**6) for _ in self.nets]
            self.scalers = [made[0] if training.scaler == "shared" else each for each in made]
        parts = zip(self.nets, self.optimizers, self.scalers, strict=True)
        self.models: list[Algorithm] = [
            self.row.make(net, optimizer, self.communicator, self.training.nodes, **self.options_of(self.row, scaler))
            for net, optimizer, scaler in parts
        ]
        if self.row.own_optimizer:
            self.optimizers = [model.optimizer for model in self.models]  # type: ignore[misc]

    def options_of(self, row: Row, scaler: torch.amp.GradScaler | None) -> dict[str, Any]:
        takes = row.family in ("gossip", "courier") or row.remembers
        given: dict[str, Any] = {"scaler": scaler} if scaler is not None and takes else {}
        return given | ({"lr": self.training.rate / 5} if row.own_optimizer else {})

    @property
    def on_parameters(self) -> bool:
        return isinstance(self.models[0], ModelAlgorithm)

    def run(self) -> Outcome:
        training = self.training
        with contextlib.ExitStack() as stack:
            if training.uneven and self.row.family != "courier":
                for model, optimizer in zip(self.models, self.optimizers, strict=True):
                    stack.enter_context(model.join(optimizer))
            for step in range(training.batches[self.rank]):
                for event in training.events:
                    if event.step == step and not event.middle:
                        self.happen(event)
                self.step(step)
        return self.end()

    def end(self) -> Outcome:
        last, mean = [], []
        # One network after the other: a rank that has left out a step takes part in the last round at `synchronize`.
        for net, model in zip(self.nets, self.models, strict=True):
            if self.on_parameters:
                model.wait()  # type: ignore[operator]
            last.append(values(net))
            if self.on_parameters:
                model.synchronize()  # type: ignore[operator]
            mean.append(values(net))
        steps = [model.stats().steps for model in self.models]
        for model in self.models:
            model.close()
        return Outcome([net.seen for net in self.nets], last, mean, self.moved, steps, self.problems)

    def step(self, step: int) -> None:
        training = self.training
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not training.zeros)
        for net in self.nets:
            net.watched = True
        left_out = (step, self.rank) in training.left_out
        for micro in range(training.micro):
            with contextlib.ExitStack() as stack:
                if training.no_sync and micro < training.micro - 1:
                    for model in self.models:
                        stack.enter_context(model.no_sync())
                losses = [self.loss(step, micro, number) for number in range(training.nets)]
                if micro == training.micro - 1:
                    for event in training.events:
                        if event.step == step and event.middle:
                            self.happen(event)
                if not left_out:
                    torch.stack(losses).sum().backward()
        for kept, copied in self.kept:
            if not torch.allclose(kept, copied, rtol=0, atol=0, equal_nan=True):
                self.problems.append(f"a gradient that was kept has changed by step {step}")
        self.kept = []
        if left_out:
            if self.row.family == "gossip":
                for model in self.models:
                    model.skip_step()  # type: ignore[operator]
            return
        for number in range(training.nets):
            self.take_step(number)
        for scaler in {id(each): each for each in self.scalers}.values():
            if scaler is not None:
                scaler.update()

    def loss(self, step: int, micro: int, number: int) -> torch.Tensor:
        training, scaler = self.training, self.scalers[number]
        x = batch(training, step, micro, self.rank, number).to(training.dtype)
        loss = loss_of(self.models[number], x)
        if micro == 0 and (step, self.rank, number) in training.overflows:
            loss = loss * float("inf")
        return loss if scaler is None else scaler.scale(loss)

    def take_step(self, number: int) -> None:
        training, net, optimizer = self.training, self.nets[number], self.optimizers[number]
        scaler = self.scalers[number]
        if scaler is not None:
            scaler.unscale_(optimizer)
        if training.clips:
            self.models[number].clip_grad_norm_(0.3)
        gradients = [p.grad for p in net.parameters() if p.requires_grad]
        if training.optimizer == "sgd" and all(g is not None and g.isfinite().all() for g in gradients):
            step = torch.cat([g.reshape(-1) for g in gradients if g is not None])
            self.moved[number] = self.moved[number] - training.rate * step.double()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
        if training.clamp:
            if self.on_parameters:
                self.models[number].wait()  # type: ignore[operator]
            before = values(net)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.clamp_(-training.clamp, training.clamp)
            self.moved[number] = self.moved[number] + (values(net) - before).double()

    def happen(self, event: Event) -> None:
        """Has an event take place, on this rank."""
        if event.rank not in (None, self.rank):
            return
        if event.waits and self.on_parameters:
            for model in self.models:
                model.wait()  # type: ignore[operator]
        if event.kind == "switch":
            self.switch(event)
        elif event.kind == "resume":
            self.resume()
        else:
            for number in range(self.training.nets):
                getattr(self, f"do_{event.kind}")(number)

    def switch(self, event: Event) -> None:
        self.row = ROWS[event.row]
        models = []
        for model, optimizer, scaler in zip(self.models, self.optimizers, self.scalers, strict=True):
            options = self.row.arguments(self.communicator.size, self.training.nodes) | self.options_of(
                self.row, scaler
            )
            models.append(model.switch_to(self.row.kind, optimizer=optimizer, **options))
        self.models = models

    def resume(self) -> None:
        states, algorithms = [], []
        for net, optimizer, model in zip(self.nets, self.optimizers, self.models, strict=True):
            algorithms.append(through_file(model.algorithm_state_dict()))
            states.append((through_file(net.state_dict()), through_file(optimizer.state_dict())))
        scales = [None if scaler is None else scaler.state_dict() for scaler in self.scalers]
        nets = self.nets
        for model in self.models:
            model.close()
        self.nets = []
        for number, (old, (state, _)) in enumerate(zip(nets, states, strict=True)):
            net = Net(77 + number, self.training.frozen, self.training.dtype)
            net.load_state_dict(state)
            net.seen = old.seen
            self.nets.append(net)
        self.make([optimizer for _, optimizer in states])
        for scaler, scale in zip(self.scalers, scales, strict=True):
            if scaler is not None and scale is not None:
                scaler.load_state_dict(scale)
        for optimizer, (_, state), model, algorithm in zip(
            self.optimizers, states, self.models, algorithms, strict=True
        ):
            optimizer.load_state_dict(state)
            model.load_algorithm_state_dict(algorithm)

    def do_wait(self, number: int) -> None:
        if self.on_parameters:
            self.models[number].wait()  # type: ignore[operator]

    def do_load(self, number: int) -> None:
        other = written(self.training, number)
        self.nets[number].load_state_dict(other.state_dict())
        self.moved[number] = values(other).double()

    def do_swap(self, number: int) -> None:
        net, model = self.nets[number], self.models[number]
        own = [p.detach().clone() for p in net.parameters()]
        fill(net, 5)
        model.eval()
        with torch.no_grad():
            loss_of(model, batch(self.training, 99, 0, self.rank, number).to(self.training.dtype))
            for parameter, value in zip(net.parameters(), own, strict=True):
                parameter.copy_(value)
        model.train()

    def do_data(self, number: int) -> None:
        for parameter in self.nets[number].parameters():
            parameter.data = parameter.data.clone()

    def do_apply(self, number: int) -> None:
        self.nets[number]._apply(lambda tensor: tensor.clone())

    def do_unflatten(self, number: int) -> None:
        self.models[number].unflatten()

    def do_consensus(self, number: int) -> None:
        if self.on_parameters:
            found = self.models[number].consensus()  # type: ignore[operator]
            if not 0 <= found < 1e3:
                self.problems.append(f"consensus() is {found}")

    def do_averaged(self, number: int) -> None:
        if not self.on_parameters:
            return
        with self.models[number].averaged(), torch.no_grad():  # type: ignore[operator]
            self.models[number].eval()
            loss_of(self.models[number], batch(self.training, 98, 0, 0, number).to(self.training.dtype))
            mean = values(self.nets[number])
            self.models[number].train()
        everyone = self.communicator.all_gather_object(mean)
        if not all(torch.equal(mean, each) for each in everyone):
            self.problems.append("averaged() has different parameters on some ranks")

    def do_stats(self, number: int) -> None:
        self.models[number].stats()
        self.models[number].residual_norm()

    def do_save(self, number: int) -> None:
        self.models[number].algorithm_state_dict()

    def do_reload(self, number: int) -> None:
        state = through_file(self.models[number].algorithm_state_dict())
        self.models[number].load_algorithm_state_dict(state)

    def do_copy(self, number: int) -> None:
        copied = copy.deepcopy(self.models[number])
        copied.train()
        x = batch(self.training, 97, 0, self.rank, number).to(self.training.dtype)
        loss_of(copied, x).backward()
        optimizer = torch.optim.SGD([p for p in copied.parameters() if p.requires_grad], lr=0.3)
        optimizer.step()

    def do_pickle(self, number: int) -> None:
        through_file(self.nets[number].state_dict())

    def do_evaluate(self, number: int) -> None:
        model = self.models[number]
        model.eval()
        with torch.no_grad():
            loss_of(model, batch(self.training, 96, 0, self.rank, number).to(self.training.dtype))
        model.train()

    def do_keep(self, number: int) -> None:
        found = [p.grad for p in self.nets[number].parameters() if p.grad is not None]
        if not self.training.zeros:
            self.kept += [(gradient, gradient.clone()) for gradient in found]

    def do_optimizer(self, number: int) -> None:
        self.optimizers[number].load_state_dict(copy.deepcopy(self.optimizers[number].state_dict()))

    def do_scaler(self, number: int) -> None:
        scaler = self.scalers[number]
        if scaler is not None:
            scaler.load_state_dict(scaler.state_dict())


def through_file(state: Any) -> Any:
    """What `torch.load` makes of what `torch.save` has written."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def train(communicator: Communicator, training: Training) -> Outcome:
    return Loop(communicator, training).run()


def texts(events: tuple[Event, ...]) -> Iterator[str]:
    for event in events:
        yield f"{event.kind}@{event.step}"
