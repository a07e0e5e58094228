"""Which start of the job this is: a name that all its ranks agree on and that no earlier start had."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from bagua_kernels.comm.joining.bounded import BoundedStore
from bagua_kernels.comm.joining.evidence import Process
from bagua_kernels.errors import CollectiveTimeoutError

_POLL = 0.01  # seconds
_FAREWELL = 1.0  # seconds that rank 0 stays after it has given up, for it may hold the store
_ROOT = "bagua_kernels/attempt"


@dataclass(frozen=True)
class Incarnation:
    """One start.

    Attributes:
        name: no other start of any job has it.
        seconds: the time that every rank has left for the rest of the start.
        processes: those of the ranks, in order.
    """

    name: str
    seconds: float
    processes: tuple[Process, ...]


def agree(store: BoundedStore, rank: int, size: int, timeout: float) -> Incarnation:
    """Makes a fresh name out of a store that may still hold what dead ranks of an earlier start have written.

    torchrun's count of restarts will not do: with several hosts each counts its own.

    1. Every rank writes its process and a number of its own, drawn at random, under its rank.
    2. Rank 0 publishes the list of these with a fresh name, again whenever one changes.
    3. A rank that finds its own entry in the list confirms the name, with the seconds that it has left.
    4. After all have confirmed, rank 0 writes that they may start. A dead rank's entry is never confirmed for a fresh name.

    A rank whose time is over writes the missing ranks to the store, so that the others need not wait for them, too.

    Args:
        store: shared by all ranks.
        rank: this rank.
        size: the number of ranks.
        timeout: seconds to wait for all ranks.

    Raises:
        CollectiveTimeoutError: if ranks are missing; it names them (only rank 0 while that is missing).
    """
    return _Agreement(store, rank, size, timeout).reach()


class _Agreement:
    def __init__(self, store: BoundedStore, rank: int, size: int, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._own = json.dumps([uuid.uuid4().hex, *Process.current().told()])
        self._name = uuid.uuid4().hex if rank == 0 else ""
        self._entries: list[str] = []

    def reach(self) -> Incarnation:
        store, rank = self._store, self._rank
        store.set(f"{_ROOT}/{rank}", self._own)
        while time.monotonic() < self._deadline:
            self._publish() if rank == 0 else self._confirm()
            if self._name and store.check(f"{_ROOT}/missing/{self._name}"):
                self._give_up(json.loads(store.get(f"{_ROOT}/missing/{self._name}")))
            if rank == 0 and not self._unconfirmed():
                left = [float(store.get(self._confirmed(r))) for r in range(1, self._size)]
                store.set(f"{_ROOT}/go/{self._name}", str(min([self._deadline - time.monotonic(), *left])))
            if self._name and store.check(f"{_ROOT}/go/{self._name}"):
                seconds = float(store.get(f"{_ROOT}/go/{self._name}"))
                # Others may have come since this rank read the list: a list that may start is complete.
                listed, *self._entries = json.loads(store.get(f"{_ROOT}/list"))
                if listed != self._name:
                    continue  # rank 0 has started once more
                processes = [Process.parse(json.loads(entry)[1:]) for entry in self._entries]
                return Incarnation(self._name, seconds, tuple(processes))
            time.sleep(_POLL)
        self._give_up(self._unconfirmed() if self._name else [0])

    def _publish(self) -> None:
        store = self._store
        keys = [f"{_ROOT}/{r}" for r in range(self._size)]
        entries = [store.get(key) if store.check(key) else "" for key in keys]
        if entries != self._entries:
            self._entries = entries
            store.set(f"{_ROOT}/list", json.dumps([self._name, *entries]))

    def _confirm(self) -> None:
        if not self._store.check(f"{_ROOT}/list"):
            return
        listed, *entries = json.loads(self._store.get(f"{_ROOT}/list"))
        if len(entries) == self._size and entries[self._rank] == self._own:
            self._name, self._entries = str(listed), entries
            self._store.set(self._confirmed(self._rank), str(self._deadline - time.monotonic()))

    def _confirmed(self, rank: int) -> str:
        return f"{_ROOT}/confirmed/{self._name}/{rank}"

    def _unconfirmed(self) -> list[int]:
        return [r for r in range(1, self._size) if not self._store.check(self._confirmed(r))]

    def _give_up(self, missing: Sequence[int]) -> NoReturn:
        if self._name:
            self._store.set(f"{_ROOT}/missing/{self._name}", json.dumps(list(missing)))
            self._store.set(f"{_ROOT}/heard/{self._name}/{self._rank}", "1")
        until = time.monotonic() + min(_FAREWELL, self._timeout / 8)
        here = [r for r in range(1, self._size) if r not in missing]
        while self._rank == 0 and time.monotonic() < until:
            if all(self._store.check(f"{_ROOT}/heard/{self._name}/{r}") for r in here):
                break
            time.sleep(_POLL)
        raise CollectiveTimeoutError(
            f"not all {self._size} ranks arrived within {self._timeout:g} s: {missing=}; see that they started, or raise "
            "timeout=",
            missing,
        )
