"""What exchanges leave to those that replace them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua_kernels.algorithms.engine.exchange import Exchange
from bagua_kernels.algorithms.tuner.repaying import Repaying, owed_by


class Handover:
    """Has new exchanges go on with what others remember, or pay what these owe.

    Nothing is copied where exchanges of one kind follow each other on one bucket: residuals of a large model are many bytes of
    memory that no rank has touched yet.
    """

    def __init__(self, replaced: Sequence[Exchange] = (), stays: bool = False) -> None:
        """Begins a handover; collective where exchanges' states are.

        Args:
            replaced: all exchanges that are replaced; no step of them is under way. None are where a state is loaded next.
            stays: True if they are replaced by exchanges that are made alike, so that those that fit are gone on with.
        """
        self._replaced = {exchange.bucket: exchange for exchange in replaced}
        self._stays = stays
        self._owed: dict[str, torch.Tensor] | None = None

    def to(self, made: Exchange) -> Exchange:
        """Returns what is to average a bucket from now on, for which `made` was made."""
        found = self._replaced.get(made.bucket)
        if found is not None and self._stays and found.communicator is made.communicator:
            return found
        # What is still to be paid is no memory of the exchange's own.
        own = found.inner if isinstance(found, Repaying) and found.paid else found
        if own is not None and made.take_over(own):
            return made
        owed = self._owed_to_all() if found is None else owed_by(found.state())
        # A state may hold what an exchange has no place for.
        owes = not self._replaced or not made.has_memory or any(name in owed for name in made.bucket.names)
        return Repaying(made, owed) if owes else made

    def _owed_to_all(self) -> dict[str, torch.Tensor]:
        """What is owed where parameters lie in other buckets than before."""
        if self._owed is None:
            self._owed = {}
            for exchange in self._replaced.values():
                self._owed |= owed_by(exchange.state())
        return self._owed
