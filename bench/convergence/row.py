"""What describes a row of `bench.convergence`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from bagua_kernels import algorithms
from bagua_kernels.algorithms import Algorithm
from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce

BASELINE = "all-reduce"
DIGITS, FASHION, CHARACTERS, RING, TEXT = ("digits",), ("fashion",), ("characters",), ("ring",), ("text",)
IMAGES = (*DIGITS, *FASHION)
ALL = (*IMAGES, *CHARACTERS)


@dataclass(frozen=True)
class Row:
    """One way to train.

    Attributes:
        label: unique.
        kind: the algorithm.
        options: of its constructor; with none it counts as the algorithm's default.
        bar: what is expected on digits: "near" the training loss of the baseline, "worse" than it, or nothing; "none": nor on
            fashion.
        rate: learning rate instead of the task's.
        momentum: of the optimizer instead of the task's; `DGC` has its own.
        optimizer: instead of the task's: its name, or a function that makes it from the model and the learning rate. The
            schedule multiplies the rate of each of its groups.
        baseline: label of the row it is compared with.
        tasks: those it is trained on.
        begins: part of the steps before compression begins.
        by_label: True if each rank sees only its own part of the examples, which are sorted by label.
        most: the loss may be so many times the baseline's, at most; None for no such bar.
        least: the loss has to be so many times the baseline's, at least; None for no such bar.
        dense: True if tables have dense gradients, also those whose model gives them sparse ones.
        raises: the error with which each run has to end, before any parameter is not finite; None if runs train to the end.
    """

    label: str
    kind: type[Algorithm]
    options: dict[str, Any] = field(default_factory=dict)
    bar: str = ""
    rate: float | None = None
    momentum: float | None = None
    optimizer: str | Callable[[torch.nn.Module, float], torch.optim.Optimizer] | None = None
    baseline: str = BASELINE
    tasks: tuple[str, ...] = IMAGES
    begins: float | None = None
    by_label: bool = False
    most: float | None = None
    least: float | None = None
    raises: type[Exception] | None = None
    dense: bool = False

    def arguments(self, steps: int) -> dict[str, Any]:
        """The options of a run of so many steps."""
        if self.begins is None:
            return self.options
        own = issubclass(self.kind, MomentumAllReduce), issubclass(self.kind, algorithms.PowerSGD)
        name = "freeze_step" if own[0] else "start_step" if own[1] else "warmup_steps"
        return {**self.options, name: round(self.begins * steps)}
