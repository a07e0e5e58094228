"""Values of all ranks, gathered through a store in a constant number of messages that follow one another."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Store

from bagua_kernels.comm.joining.bounded import await_keys, bounded, values_of
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError

_AFTERWARDS = 60.0  # seconds after which a thread ends that nobody has ended
_LENGTH = 4  # bytes of the length of a value


class Gathering:
    """Gathers bytes of all ranks; all ranks call it in one order.

    1. Each rank stores its value.
    2. Rank 0 waits until all are there, and stores the list of them.
    3. The others wait until this list is there, and fetch it.

    So a round takes four to six one-way delays for any number of ranks, where a ring takes one for each of them. Each rank
    fetches one list rather than all values one by one. Values are not checked: anybody may have written into the store.

    Args:
        store: shared by all ranks.
        name: that no other gathering of this store has or had.
        rank: this rank.
        size: the number of ranks.
        deadline: when all waits are over, as of `time.monotonic`.
        look: called again and again while it waits; what it raises ends the wait.
        longest: bytes of a value at most.

    Attributes:
        looks: as `look`; more may be added.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        deadline: float,
        look: Callable[[], object] | None = None,
        longest: int = 1 << 20,
    ) -> None:
        self.looks = [] if look is None else [look]
        self._store: Any = store  # torch declares values as text, and takes bytes
        self._name = f"bagua_kernels/gathering/{name}"
        self._rank = rank
        self._size = size
        self._deadline = deadline
        self._longest = longest
        self._numbers = itertools.count()

    def __call__(self, value: bytes) -> list[bytes]:
        """Returns the values of all ranks, in rank order.

        Raises:
            ValueError: if this rank's value is too long.
            CollectiveTimeoutError: if not all ranks come in time.
            CommunicationError: if what the store holds is no list of values.
            RuntimeError: if the store cannot be reached.
        """
        if len(value) > self._longest:
            raise ValueError(f"expected a value of at most {self._longest} bytes, got {len(value)}")
        if self._size == 1:
            return [value]
        key = f"{self._name}/{next(self._numbers)}"
        left = max(0.001, self._left() - _AFTERWARDS)
        try:
            packed = bounded(lambda given_up: self._round(key, value, given_up), left, self._look)
        except TimeoutError:
            raise CollectiveTimeoutError(
                "not all ranks of torch's process group came in time to make a communicator: see that all of them make "
                "one, in the same order as others, or raise timeout="
            ) from None
        return self._unpack(packed)

    def _look(self) -> None:
        for look in self.looks:
            look()

    def _round(self, key: str, value: bytes, given_up: threading.Event) -> bytes:
        store, everyone = self._store, f"{key}/all"
        if self._rank > 0:
            store.set(f"{key}/{self._rank}", value)
            await_keys(store, [everyone], self._left(), given_up)
            packed: bytes = store.get(everyone)
            return packed
        keys = [f"{key}/{rank}" for rank in range(1, self._size)]
        await_keys(store, keys, self._left(), given_up)
        values = [value, *values_of(store, keys)]
        packed = b"".join(len(one).to_bytes(_LENGTH, "little") + one for one in values)
        store.set(everyone, packed)
        return packed

    def _left(self) -> float:
        # `bounded` ends the wait in time, and the thread with it.
        return self._deadline - time.monotonic() + _AFTERWARDS

    def _unpack(self, packed: bytes) -> list[bytes]:
        found, at = list[bytes](), 0
        while at < len(packed) and len(found) < self._size:
            length = int.from_bytes(packed[at : at + _LENGTH], "little")
            at += _LENGTH + length
            found.append(packed[at - length : at])
        if at != len(packed) or len(found) != self._size or max(map(len, found)) > self._longest:
            raise CommunicationError(
                f"torch's store holds no list of values of {self._size} ranks, but {len(packed)} other bytes: see that nobody "
                "else reaches it"
            )
        return found
