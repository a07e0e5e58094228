"""What exchanges leave to those that replace them."""

from __future__ import annotations

import torch

from bagua_kernels.algorithms.engine.buckets import Buckets
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.repaying import Repaying, owed_by


class Handover:
    """Has new exchanges go on with what others remember, or pay what these owe.

    Nothing is copied where exchanges of one kind follow each other on one bucket: residuals of a large model are many bytes of
    memory that no rank has touched yet.
    """

    def __init__(self, before: Buckets | None = None, stays: bool = False) -> None:
        """Begins a handover; collective where exchanges' states are.

        Args:
            before: buckets with the exchanges that are replaced; no step of them is under way. None where a state is loaded next.
            stays: True if they are replaced by exchanges that are made alike, so that those that fit are reused.
        """
        self._before, self._stays = before, stays
        self._owed: dict[str, torch.Tensor] | None = None
        self._replaced = {} if before is None else {exchange.bucket: exchange for exchange in before.exchanges}

    def to(self, made: Exchange) -> Exchange:
        """Returns what is to average a bucket from now on, for which `made` was made."""
        if self._before is None:
            # The state may hold what an exchange has no place for.
            return Repaying(made, {})
        found = self._replaced.get(made.bucket)
        if found is not None and self._stays and found.communicator is made.communicator:
            return found
        # What is still to be paid is no memory of the exchange's own.
        own = found.inner if isinstance(found, Repaying) and found.paid else found
        if own is not None and made.take_over(own):
            return made
        owed = self._owed_to_all() if found is None else owed_by(found.state())
        owes = not made.has_memory or any(name in owed for name in made.bucket.names)
        return Repaying(made, owed) if owes else made

    def _owed_to_all(self) -> dict[str, torch.Tensor]:
        """What is owed to all parameters, which lie in other buckets than before; collective at the first call."""
        # No `cached_property`: before Python 3.12 its lock is one for all objects, and ranks that are threads would wait for it.
        if self._owed is None:
            self._owed = {} if self._before is None else owed_by(self._before.state())
        return self._owed
