"""Ranks that nothing connects: what sockets are put around where there is no store and no group of torch's."""

from __future__ import annotations

from bagua_kernels.comm.backends.local.communicator import LocalCommunicator
from bagua_kernels.comm.backends.local.world import LocalGroup, LocalWorld
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.work import CLOSED


class Bare(LocalCommunicator):
    """Has a rank, a size and a secret, as the communicator beneath a `StripedCommunicator` that never uses it.

    Its operations would wait for ranks of other processes, which are not here.
    """

    def __init__(self, rank: int, size: int, timeout: float, secret: Secret) -> None:
        """Begins with a secret that is the same on all ranks."""
        world = LocalWorld(size, timeout)
        group = LocalGroup(tuple(range(size)))
        group.secret = secret
        super().__init__(world, group, rank)
        self._timeout, self._secret = timeout, secret

    def close(self, limit: float | None = None) -> None:
        """Ends it; there is nobody to wait for."""
        self._leave(CLOSED)

    def _split(self, ranks: tuple[int, ...]) -> Bare:
        secret = self._secret.derive("split", self._next_split(ranks))
        return Bare(ranks.index(self.rank), len(ranks), self._timeout, secret)
