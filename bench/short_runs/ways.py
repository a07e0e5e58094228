"""Outer steps that the study compares, of many ways at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from bagua_kernels.algorithms.local_steps.agreement import lr_after, momentum_after, slow_momentum_after
from bagua_kernels.compression import ChunkedTopK

Numbers = Callable[[int, float, int], tuple[float, float]]
Family = Literal["nesterov", "slow", "sparse"]
CODEC = ChunkedTopK()


@dataclass(frozen=True)
class Way:
    """One outer step.

    Attributes:
        name: in tables.
        family: "nesterov" of DiLoCo and MuLoCo, "slow" of SlowMo, or "sparse" of SparseLoCo.
        numbers: the outer learning rate and the momentum; of SparseLoCo beta instead of that. They follow from the number of
            the round, from 1, from the share on which ranks have agreed, and from the number of ranks: see `Agreement`.
        codec: of SparseLoCo.
    """

    name: str
    family: Family
    numbers: Numbers
    codec: ChunkedTopK = CODEC


def fixed(lr: float, momentum: float, family: Family = "nesterov") -> Way:
    """A pair that stays the same."""
    return Way(f"{family} {lr:g} {momentum:g}", family, lambda *_: (lr, momentum))


class Outer:
    """The outer parameters of some ways of one family, in each of which as many ranks train."""

    def __init__(self, ways: list[Way], ranks: int, parameters: dict[str, torch.Tensor]) -> None:
        """Begins at the parameters, of shape (ways x ranks, ...)."""
        self._ways, self._ranks = ways, ranks
        self._parameters = {name: p.detach().view(len(ways), ranks, -1) for name, p in parameters.items()}
        self._starts = {name: p[:, 0].clone() for name, p in self._parameters.items()}
        self._memory = {
            name: torch.zeros_like(p if self._is_sparse(name) else p[:, 0]) for name, p in self._parameters.items()
        }
        self._round, self._rate = 0, 0.0
        self._shares = [0.0] * len(ways)

    def _is_sparse(self, name: str) -> bool:
        return self._ways[0].family == "sparse" and self._parameters[name].shape[-1] >= 4096

    @torch.no_grad()
    def step(self, inner_rate: float) -> None:
        """Takes the outer step of all ways, after a round whose last step had this learning rate of the optimizer."""
        self._round += 1
        # Those of the last round, as ranks have them.
        shares, self._shares = self._shares, self._agreement()
        numbers = torch.tensor(
            [way.numbers(self._round, share, self._ranks) for way, share in zip(self._ways, shares, strict=True)]
        )
        lr, momentum = numbers[:, :1], numbers[:, 1:]
        for name, p in self._parameters.items():
            start, memory = self._starts[name], self._memory[name]
            difference = start.unsqueeze(1) - p
            match self._ways[0].family:
                case "nesterov":
                    mean = difference.mean(dim=1)
                    memory.mul_(momentum).add_(mean)
                    start.sub_(lr * (mean + momentum * memory))
                case "slow":
                    mean = difference.mean(dim=1)
                    memory.mul_(momentum * (inner_rate / self._rate if self._rate else 0.0)).add_(mean)
                    start.sub_(lr * memory)
                case "sparse" if self._is_sparse(name):
                    memory.mul_(momentum.unsqueeze(1)).add_(difference)
                    sent = torch.stack([self._decoded(way, memory[i]) for i, way in enumerate(self._ways)])
                    memory.sub_(sent)
                    senders = (sent != 0).sum(dim=1).clamp_min(1)
                    start.sub_(lr * sent.sum(dim=1) / senders)
                case "sparse":
                    start.sub_(lr * difference.mean(dim=1))
            p.copy_(start.unsqueeze(1))
        self._rate = inner_rate

    def _agreement(self) -> list[float]:
        """The share of each way's mean pseudo-gradient, by its square norm, that is not noise of ranks' own."""
        own, mean = torch.zeros(2, len(self._ways))
        for name, p in self._parameters.items():
            difference = self._starts[name].unsqueeze(1) - p
            own += difference.square().sum(dim=2).mean(dim=1)
            mean += difference.mean(dim=1).square().sum(dim=1)
        # E|mean|^2 = signal + noise / ranks, and E|own|^2 = signal + noise.
        signal = (self._ranks * mean - own) / (self._ranks - 1)
        return (signal / mean.clamp_min(1e-30)).clamp(0.0, 1.0).tolist()

    def _decoded(self, way: Way, residuals: torch.Tensor) -> torch.Tensor:
        # Chunks of one copy end with it: all copies are one vector to the codec.
        out = torch.empty_like(residuals)
        way.codec.decode(way.codec.encode(residuals.flatten()), out.view(-1))
        return out

    def ends(self) -> dict[str, torch.Tensor]:
        """The outer parameters of all ways, shape (ways, elements)."""
        return self._starts


def auto(family: Family) -> Way:
    """What the algorithms take by default."""

    def numbers(number: int, share: float, ranks: int) -> tuple[float, float]:
        if family == "slow":
            return 1.0, slow_momentum_after(number, share, 1.0, ranks)
        lr = lr_after(number, share, ranks)
        return lr, momentum_after(number, share, lr, ranks)

    return Way(f"{family} auto", family, numbers)


MEANS = "nesterov 1 0"
WAYS = {
    way.name: way
    for way in (
        *(fixed(0.7, momentum) for momentum in (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)),
        *(fixed(1.0, momentum) for momentum in (0.0, 0.3, 0.5)),
        auto("nesterov"),
        *(fixed(1.0, momentum, "slow") for momentum in (0.3, 0.5, 0.7)),
        auto("slow"),
        *(fixed(lr, beta, "sparse") for lr, beta in ((1.0, 0.9), (1.0, 0.95), (1.0, 1.0), (0.7, 0.95), (1.4, 0.95))),
    )
}
LONG = 400  # rounds, of which all ways would take hours
LONG_WAYS = [f"nesterov {pair}" for pair in ("0.7 0.5", "0.7 0.7", "0.7 0.8", "0.7 0.9", "1 0", "1 0.3", "auto")]
# The default of each family, and the fixed pairs that it is compared with; SlowMo with a momentum of 0 is plain means.
AUTO = {"nesterov": "nesterov auto", "slow": "slow auto", "sparse": "sparse 1 0.95"}
FIXED = {
    family: [name for name in WAYS if name.startswith(family) and name != AUTO[family]]
    + ([MEANS] if family == "slow" else [])
    for family in AUTO
}


def ways_of(rounds: int) -> list[str]:
    """The names of the ways that runs of so many rounds compare."""
    return list(WAYS) if rounds < LONG else LONG_WAYS
