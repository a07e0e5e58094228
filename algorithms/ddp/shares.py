"""The buckets of `DistributedDataParallel` as buckets of this package, which may change between two passes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.vectors import Named
from bagua_kernels.algorithms.gradient_algorithm import GradientAlgorithm
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator


@dataclass(frozen=True)
class Share:
    """Those tensors of one of DDP's buckets that are encoded alike.

    Attributes:
        positions: of the tensors in DDP's bucket.
        exchange: of a bucket with their shapes, in which each tensor begins with a block of its own.
    """

    positions: list[int]
    exchange: Exchange


class BucketShares:
    """The parts of each bucket, and what their exchanges remember when buckets change.

    DDP lays out its buckets anew after the first pass. Exchanges cannot go on with other tensors: what they remember is
    taken apart by parameter, and the new ones take it over.
    """

    def __init__(self, algorithm: GradientAlgorithm, module: torch.nn.Module | None) -> None:
        """Knows no bucket yet.

        Args:
            algorithm: makes exchanges, and has the place of each parameter.
            module: whose names parameters have; None for numbers in the order in which they come.
        """
        self._algorithm = algorithm
        # Their values are kept, so that no other parameter takes their place in memory.
        self._names: dict[torch.Tensor, str] = {}
        if module is not None:
            self._names = {p: name for name, p in module.named_parameters()}
        self._buckets: list[tuple[list[torch.Tensor], list[Share]]] = []
        self._recalled: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def exchanges(self) -> list[Exchange]:
        """All of them, in the order of buckets."""
        return [part.exchange for _, parts in self._buckets for part in parts]

    def knows(self, index: int, parameters: Sequence[torch.Tensor]) -> bool:
        """Returns True if DDP's bucket of a number has these parameters."""
        if index >= len(self._buckets):
            return False
        known = self._buckets[index][0]
        return len(known) == len(parameters) and all(a is b for a, b in zip(known, parameters, strict=True))

    def parts(self, index: int) -> list[Share]:
        """Returns the parts of a known bucket."""
        return self._buckets[index][1]

    def lay_out(self, index: int, parameters: Sequence[torch.Tensor], communicator: Communicator) -> None:
        """Makes the exchanges of a bucket that is new; collective if later ones were known, which are forgotten."""
        if index < len(self._buckets):
            self._recalled = self.state()
            del self._buckets[index:]
            for exchange in self.exchanges:
                self._forget(exchange.bucket.names)
        kinds: dict[Hashable, list[tuple[int, bool]]] = {}
        for position, parameter in enumerate(parameters):
            kind, exact = self._algorithm.place(self.name(parameter), cast("torch.nn.Parameter", parameter))
            kinds.setdefault(kind, []).append((position, exact))
        parts: list[Share] = []
        for kind, places in kinds.items():
            chosen = [parameters[position] for position, _ in places]
            bucket = Bucket(
                chosen,
                align=self._algorithm.alignment,
                exact=[exact for _, exact in places],
                index=len(self.exchanges) + len(parts),
                kind=kind,
                names=[self.name(parameter) for parameter in chosen],
            )
            exchange = self._algorithm.exchange_for(bucket, communicator)
            if self._recalled:
                exchange.load(self._recalled)
                self._forget(bucket.names)
            parts.append(Share([position for position, _ in places], exchange))
        self._buckets.append((list(parameters), parts))

    def _forget(self, names: Sequence[str]) -> None:
        """Drops what exchanges have themselves."""
        for named in self._recalled.values():
            for name in names:
                named.pop(name, None)

    def name(self, parameter: torch.Tensor) -> str:
        """The name of a parameter, or its number."""
        return self._names.setdefault(parameter, str(len(self._names)))

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """What exchanges remember, of each thing a tensor for each parameter's name; collective."""
        found = {key: dict(named) for key, named in self._recalled.items()}
        for exchange in self.exchanges:
            for key, state in exchange.state().items():
                found.setdefault(key, {}).update(state)
        return found

    def load(self, state: Mapping[str, Named]) -> None:
        """Gives all exchanges, those to come too, what `state` gave."""
        self._recalled = {key: dict(named) for key, named in state.items()}
        for exchange in self.exchanges:
            # States have no loss scale; the next step brings this one to its own.
            exchange.loss_scale = 1.0
            exchange.load(state)
            self._forget(exchange.bucket.names)
