"""How the ranks of a new communicator get the unique id by which NCCL connects them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch._C._distributed_c10d import PrefixStore, Store

from bagua_kernels.comm.backends.nccl import binding as nccl_binding
from bagua_kernels.comm.communicator import Communicator, gather_json
from bagua_kernels.errors import BackendUnavailableError


class UniqueIds(Protocol):
    """Where the ranks of one communicator find the id that its rank 0 makes."""

    def share(self, rank: int, size: int, limit: float, make: Callable[[], bytes]) -> bytes:
        """Returns the id, once all ranks have called this; NCCL itself would wait for them without a limit.

        Args:
            rank: this one.
            size: the number of ranks.
            limit: seconds.
            make: returns a new id; called on rank 0.

        Raises:
            CollectiveTimeoutError: not all ranks came in time.
            CommunicationError: a rank is lost.
        """

    def split(self, label: str, ranks: tuple[int, ...]) -> UniqueIds:
        """Returns those of a communicator of some of the ranks.

        Args:
            label: of the new communicator, which no other one of these ranks has.
            ranks: the members, in order; this rank is one.
        """

    def end(self, reason: str) -> None:
        """Ends what is needed for further ones; harmless where that is nothing."""


class StoreIds:
    """By a store that all ranks reach.

    Args:
        store: which lasts as long as communicators are made.
        key: a name that no other communicator over this store ever had.
    """

    def __init__(self, store: Store, key: str) -> None:
        self.store, self._key = store, key

    def share(self, rank: int, size: int, limit: float, make: Callable[[], bytes]) -> bytes:
        """See `UniqueIds.share`."""
        return nccl_binding.share_unique_id(
            PrefixStore(f"bagua_kernels/{self._key}", self.store), rank, size, limit, make
        )

    def split(self, label: str, ranks: tuple[int, ...]) -> StoreIds:
        """See `UniqueIds.split`."""
        return StoreIds(self.store, f"{self._key}/{label}")

    def end(self, reason: str) -> None:
        """See `UniqueIds.end`; a store has other users."""


class LetterIds:
    """By a communicator of the same ranks on their CPUs, so that no rank is special and no store has to last.

    Args:
        letters: the communicator, for this alone.
        problem: why this rank has no NCCL; empty if it has.
    """

    def __init__(self, letters: Communicator, problem: str = "") -> None:
        self.letters, self._problem = letters, problem

    def share(self, rank: int, size: int, limit: float, make: Callable[[], bytes]) -> bytes:
        """See `UniqueIds.share`; the limit is the timeout of the letters.

        Raises:
            BackendUnavailableError: on all ranks, if one has no NCCL.
        """
        own = make().hex() if rank == 0 and not self._problem else ""
        found = gather_json(self.letters, [own, self._problem])
        if reasons := "; ".join(f"rank {each}: {problem}" for each, (_, problem) in enumerate(found) if problem):
            raise BackendUnavailableError(
                f"NcclCommunicator needs a GPU and NCCL through CuPy on every rank: {reasons}"
            )
        return bytes.fromhex(found[0][0])

    def split(self, label: str, ranks: tuple[int, ...]) -> LetterIds:
        """See `UniqueIds.split`; sends nothing over sockets."""
        return LetterIds(self.letters._split(ranks))

    def end(self, reason: str) -> None:
        """See `UniqueIds.end`."""
        self.letters.abort(reason)
