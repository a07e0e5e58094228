"""Which algorithm of local steps suits a line, and with which options."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.algorithms.allreduce import GradientAllReduce
from bagua_kernels.algorithms.choosing.cost.methods import bytes_of
from bagua_kernels.algorithms.local_steps.diloco import DiLoCo
from bagua_kernels.algorithms.local_steps.sparse_loco import SparseLoCo
from bagua_kernels.suggestions import did_you_mean

LINES = {"1Mbit": 1e6, "10Mbit": 1e7, "100Mbit": 1e8, "1Gbit": 1e9}
# Longer intervals cost more of the loss than a payload of fewer bytes does.
_LONGEST = 30
# Where nothing else fits: the longest interval with which the paper on SparseLoCo still trains well.
_LIMIT = 250
# Part of the time between two rounds that a line may be busy: the rest is for what steps and lines vary.
_BUSY = 0.9


@dataclass(frozen=True)
class Choice:
    """One algorithm on a line.

    Attributes:
        algorithm: its class.
        options: its keyword arguments.
        bytes_per_round: that a rank sends in one exchange of all parameters.
        wire_seconds: that this takes on the line.
        interval: the least number of steps beside which the exchange fits.
        fits: True if the interval is one that trains well.
    """

    algorithm: type[Algorithm]
    options: Mapping[str, Any]
    bytes_per_round: float
    wire_seconds: float
    interval: int
    fits: bool


@dataclass(frozen=True)
class Preset:
    """The choices for a line, best first for the loss, and the first that fits.

    Attributes:
        line: bits per second.
        parameters: elements of the model.
        ranks: their number.
        step_seconds: of one step of the optimizer without communication.
        choices: all that were compared.
    """

    line: float
    parameters: int
    ranks: int
    step_seconds: float
    choices: tuple[Choice, ...]

    @property
    def choice(self) -> Choice:
        """The first that fits, else the one with the shortest interval."""
        return next((c for c in self.choices if c.fits), min(self.choices, key=lambda c: c.interval))

    def wrap(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Algorithm:
        """Wraps a module by the choice; collective.

        Args:
            module: as for the algorithm.
            optimizer: as for `ModelAlgorithm`; gradient algorithms leave it as it is.
            **options: further ones, or others than the choice's.
        """
        given = {**self.choice.options, **options}
        if self.choice.algorithm is GradientAllReduce:
            return GradientAllReduce(module, **given)
        return self.choice.algorithm(module, optimizer, **given)

    def table(self) -> Table:
        """The choices, the one that `wrap` takes marked."""
        title = f"{self.line / 1e6:g} Mbit/s, {self.parameters} parameters, {self.ranks} ranks, {self.step_seconds:g} s a step"
        table = Table("algorithm", "options", "MB a round", "s on the line", "interval", "", title=title)
        for each in self.choices:
            options = ", ".join(f"{name}={value!r}" for name, value in each.options.items())
            sent, seconds = f"{each.bytes_per_round / 1e6:.3f}", f"{each.wire_seconds:.2f}"
            mark = "chosen" if each is self.choice else ""
            table.add_row(each.algorithm.__name__, options, sent, seconds, str(each.interval), mark)
        return table

    def __str__(self) -> str:
        """The table as text."""
        text = io.StringIO()
        Console(file=text, width=140).print(self.table())
        return text.getvalue()


def preset(line: str | float, *, parameters: int, ranks: int, step_seconds: float) -> Preset:
    """Chooses an algorithm, its interval, codec and delay by the bytes that a line carries beside training.

    An exchange of n bytes fits beside H steps if 8 n / line is at most 0.9 H times a step's seconds. Each algorithm gets the
    least H with which it fits. They are compared in the order of their loss at equal H: the synchronous mean, DiLoCo in float32,
    DiLoCo in 4 bits, SparseLoCo. The first whose H is at most 30 is chosen.

    Args:
        line: bits per second of each rank, or one of "1Mbit", "10Mbit", "100Mbit" and "1Gbit". `python -m
            bagua_kernels.comm.doctor` measures it.
        parameters: elements of the model.
        ranks: their number.
        step_seconds: of one step of the optimizer without communication, measured on the slowest rank.

    Raises:
        ValueError: the line is neither a rate above 0 nor one of these names, or another number is too small.
    """
    rate = LINES.get(line) if isinstance(line, str) else line
    if rate is None or not rate > 0:
        raise ValueError(
            f"expected bits per second or one of {', '.join(LINES)}, got {line!r}{did_you_mean(line, LINES)}"
        )
    if parameters < 1 or ranks < 2 or not step_seconds > 0:
        raise ValueError(
            f"expected at least 1 parameter, 2 ranks and a step of more than 0 seconds, got {parameters=}, {ranks=} and "
            f"{step_seconds=}"
        )
    both_passes = 2 * (ranks - 1) / ranks
    sparse = "chunked_topk:k=64,chunk=4096"
    candidates: list[tuple[type[Algorithm], dict[str, Any], float]] = [
        (GradientAllReduce, {}, 4 * both_passes),
        (DiLoCo, {}, 4 * both_passes),
        (DiLoCo, {"codec": "absmax_int4"}, bytes_of("absmax_int4") * both_passes),
        (SparseLoCo, {"codec": sparse}, bytes_of(sparse) * (ranks - 1)),
    ]
    choices = []
    for algorithm, options, bytes_per_parameter in candidates:
        sent = bytes_per_parameter * parameters
        seconds = 8 * sent / rate
        interval = max(1, math.ceil(seconds / (_BUSY * step_seconds)))
        if algorithm is GradientAllReduce:
            choices.append(Choice(algorithm, options, sent, seconds, interval, interval == 1))
            continue
        # A round that takes no time is no reason to meet in each step.
        interval = max(interval, 2)
        delay = min(interval - 1, math.ceil(seconds / step_seconds))
        chosen = {**options, "interval": min(interval, _LIMIT), "delay": min(delay, _LIMIT - 1)}
        choices.append(Choice(algorithm, chosen, sent, seconds, interval, interval <= _LONGEST))
    return Preset(rate, parameters, ranks, step_seconds, tuple(choices))
