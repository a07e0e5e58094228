"""One cell of the study: all ways train from the same parameters, with the same text for the same ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from bench.convergence.tasks import up_and_down
from bench.short_runs.stacked import CONTEXT, OPTIMIZERS, Copies, State, fresh
from bench.short_runs.ways import Outer, Way
from examples import corpus

BATCH = 4  # windows a rank and step
EARLIER = 3000  # steps of eight times that batch, of which trained weights come
_EVALUATED = 1024  # windows


@dataclass(frozen=True)
class Cell:
    """What is trained, in which all ways are compared.

    Attributes:
        rounds: of the run.
        ranks: of the job.
        start: "scratch", or "trained": with weights that another text has trained.
        optimizer: of the local steps, "adamw" or "muon".
        interval: steps of a round.
    """

    rounds: int
    ranks: int
    start: Literal["scratch", "trained"]
    optimizer: Literal["adamw", "muon"]
    interval: int = 15

    @property
    def name(self) -> str:
        """In tables and files."""
        longer = "" if self.interval == 15 else f", {self.interval} steps each"
        return f"{self.rounds} rounds{longer}, {self.ranks} ranks, {self.start}, {self.optimizer}"


class Text:
    """Windows of a text, which a cell draws at random."""

    def __init__(self, text: corpus.Corpus) -> None:
        self.x, self.y = corpus.windows(text.training, CONTEXT)
        every = max(1, len(text.validation) // CONTEXT // _EVALUATED)
        self.test = tuple(part[::every] for part in corpus.windows(text.validation, CONTEXT))

    def order(self, steps: int, ranks: int, seed: int) -> torch.Tensor:
        """Numbers of windows, shape (steps, ranks, `BATCH`)."""
        return torch.randint(len(self.x), (steps, ranks, BATCH), generator=torch.Generator().manual_seed(seed))


@lru_cache
def text(name: Literal["manual", "library"]) -> Text:
    """The text of all cells, or the one that trained weights come from: the source of Python's standard library."""
    return Text(corpus.manual() if name == "manual" else corpus.library())


@lru_cache
def trained(optimizer: str, seed: int) -> State:
    """Weights that one rank has trained with the other text."""
    copies = Copies(fresh(seed), 1)
    train(copies, optimizer, text("library"), EARLIER, 8, seed)
    return copies.state(0)


def train(copies: Copies, optimizer: str, of: Text, steps: int, ranks: int, seed: int) -> None:
    """Trains one copy with the batches of so many ranks."""
    inner = OPTIMIZERS[optimizer](copies)
    for step, windows in enumerate(of.order(steps, ranks, seed).flatten(1)):
        copies.zero_grad()
        copies.losses(of.x[windows][None], of.y[windows][None]).sum().backward()
        inner.step(up_and_down((step + 1) / (steps + 1)))


def begin(cell: Cell, seed: int) -> State:
    """The parameters with which a cell begins."""
    return fresh(seed) if cell.start == "scratch" else trained(cell.optimizer, seed)


def run(cell: Cell, ways: list[Way], seed: int) -> dict[str, float]:
    """Trains by all ways, and returns the loss of the outer parameters in nats per character of text that is held back."""
    found = text("manual")
    copies = Copies(begin(cell, seed), len(ways) * cell.ranks)
    inner = OPTIMIZERS[cell.optimizer](copies)
    families = [(name, list(group)) for name, group in itertools.groupby(ways, lambda way: way.family)]
    outer, first = [], 0
    for _, group in families:
        rows = slice(first * cell.ranks, (first + len(group)) * cell.ranks)
        outer.append(Outer(group, cell.ranks, {name: p[rows] for name, p in copies.parameters.items()}))
        first += len(group)
    steps = cell.rounds * cell.interval
    for step, windows in enumerate(found.order(steps, cell.ranks, seed)):
        x, y = (part[windows].repeat(len(ways), 1, 1) for part in (found.x, found.y))
        copies.zero_grad()
        copies.losses(x, y).sum().backward()
        rate = up_and_down((step + 1) / (steps + 1))
        inner.step(rate)
        if (step + 1) % cell.interval == 0:
            for each in outer:
                each.step(rate)
    # All ranks of a way have its outer parameters.
    return {way.name: loss for way, loss in zip(ways, evaluated(copies, cell.ranks), strict=True)}


def together(cell: Cell, seed: int) -> float:
    """The loss of ranks that average their gradients in each step, as `DistributedDataParallel` does."""
    copies = Copies(begin(cell, seed), 1)
    train(copies, cell.optimizer, text("manual"), cell.rounds * cell.interval, cell.ranks, seed)
    return evaluated(copies, 1)[0]


@torch.no_grad()
def evaluated(copies: Copies, ranks: int) -> list[float]:
    """The losses of every `ranks`-th copy over text that is held back."""
    x, y = text("manual").test
    some = Copies(copies.state(0), copies.count // ranks)
    for name, p in some.parameters.items():
        p.data.copy_(copies.parameters[name][::ranks])
    total = torch.zeros(some.count)
    for first in range(0, len(x), 32):
        inputs, targets = (part[first : first + 32] for part in (x, y))
        losses = some.losses(*(part.expand(some.count, *part.shape) for part in (inputs, targets)))
        total += losses * len(inputs)
    return (total / len(x)).tolist()
