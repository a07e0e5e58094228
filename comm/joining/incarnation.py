"""Which start of the job this is: a name that all its ranks agree on and that no earlier start had."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from bagua_kernels.comm.joining.bounded import BoundedStore
from bagua_kernels.comm.joining.evidence import Process
from bagua_kernels.comm.joining.installed import Installed, check_installed, mismatch
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError, MismatchError, RankLostError

_POLL = 0.01  # seconds
_PAUSES = (0.05, 0.5)  # seconds of a wait, after which a rank looks for what else may have come: the first, the longest
_FAREWELL = 1.0  # seconds that rank 0 stays after it has given up, for it may hold the store
_LONG_FAREWELL = 5.0  # where the others may still be on their way
_SETTLED = 1.0  # seconds after which a refusal is not one of an earlier start, whose rank would have come again
_NOTHING = '["", "", ""]'  # in place of a refusal
REFUSED = "bagua_kernels/attempt/refused"  # the last refusal of an environment
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
    2. Rank 0 publishes the list of these with a fresh name, again whenever one changes, and answers each number in it.
    3. A rank whose number is answered finds its own entry in the list, and confirms the name, with the seconds that it has left.
    4. After all have confirmed, rank 0 writes that they may start. A dead rank's entry is never confirmed for a fresh name.

    Each step is awaited in the store by a key that only this start has. So no rank asks again and again, and what a rank
    fetches, the list twice, does not grow with the time that others take.

    A rank whose time is over writes the missing ranks to the store, so that the others need not wait for them, too. So does one
    that finds another WORLD_SIZE, or another version of this package, than its own.

    Args:
        store: shared by all ranks.
        rank: this rank.
        size: the number of ranks.
        timeout: seconds to wait for all ranks.

    Raises:
        CollectiveTimeoutError: if ranks are missing; it names them (only rank 0 while that is missing).
        RankLostError: if a rank refuses its environment.
        MismatchError: if ranks have different numbers of ranks, or versions of this package.
    """
    return _Agreement(store, rank, size, timeout).reach()


class _Agreement:
    def __init__(self, store: BoundedStore, rank: int, size: int, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._about = _About(size, Installed.here())
        self._number = uuid.uuid4().hex
        self._own = json.dumps([self._number, *Process.current().told(), self._about.told()])
        self._name = uuid.uuid4().hex if rank == 0 else ""
        self._seen = self._name  # by which ranks that do not belong together speak of the start
        self._listed = 0
        self._refusal, self._refused_since = _NOTHING, self._deadline
        self._entries: list[str] = []

    def reach(self) -> Incarnation:
        store, rank = self._store, self._rank
        if store.check(REFUSED) and json.loads(store.get(REFUSED))[1] == str(rank):
            # Of this rank's process before this one.
            store.set(REFUSED, _NOTHING)
        store.set(f"{_ROOT}/{rank}", self._own)
        pause = _PAUSES[0]
        while time.monotonic() < self._deadline:
            awaited = self._awaited()
            began = time.monotonic()
            if store.wait(awaited, max(0.001, min(pause, self._deadline - began))):
                made = self._come(awaited)
                if made is not None:
                    return made
                if self._awaited() == awaited and time.monotonic() - began < _POLL:
                    time.sleep(_POLL)  # what it waits for is there, and not of this start
            else:
                pause = min(1.5 * pause, _PAUSES[1])
                self._glance()
        self._give_up(self._unconfirmed() if self._name else [0])

    def _awaited(self) -> list[str]:
        """Returns the keys that this rank waits for."""
        if self._rank == 0:
            complete = self._entries and all(self._entries)
            return [self._confirmed(r) if complete else f"{_ROOT}/{r}" for r in range(1, self._size)] or [f"{_ROOT}/0"]
        return [f"{_ROOT}/go/{self._name}" if self._name else f"{_ROOT}/answer/{self._number}"]

    def _come(self, awaited: list[str]) -> Incarnation | None:
        """Goes on, now that the keys that it waited for are there; returns the start if all ranks may start."""
        store = self._store
        if self._rank == 0:
            if not (self._entries and all(self._entries)):
                self._publish(store.gather([f"{_ROOT}/{r}" for r in range(self._size)]))
            if self._size > 1 and awaited[0] != self._confirmed(1):
                return None
            self._compare({peer: _About.of(entry) for peer, entry in enumerate(self._entries)})
            left = [float(text) for text in store.gather(awaited)] if self._size > 1 else []
            seconds = min([self._deadline - time.monotonic(), *left])
            store.set(f"{_ROOT}/go/{self._name}", str(seconds))
            return self._made(seconds)
        if not self._name:
            self._confirm()
            return None
        # Others may have come since this rank read the list: a list that may start is complete.
        told, text = store.gather([*awaited, f"{_ROOT}/list"])
        listed, *entries = json.loads(text)
        if listed != self._name:  # rank 0 has started once more
            self._name = ""
            return None
        self._entries = entries
        return self._made(float(told))

    def _made(self, seconds: float) -> Incarnation:
        processes = [Process.parse(json.loads(entry)[1:4]) for entry in self._entries]
        return Incarnation(self._name, seconds, tuple(processes))

    def _glance(self) -> None:
        """Looks for what else than its turn may have come."""
        store = self._store
        if self._rank == 0:
            self._publish(
                [store.get(key) if store.check(key) else "" for key in (f"{_ROOT}/{r}" for r in range(self._size))]
            )
            if store.check(f"{_ROOT}/beyond/{self._name}"):
                peer, *told = json.loads(store.get(f"{_ROOT}/beyond/{self._name}"))
                self._compare({0: self._about, int(peer): _About.parse(*told)})
        elif not self._name:
            self._confirm()
        if self._name and store.check(f"{_ROOT}/missing/{self._name}"):
            self._give_up(json.loads(store.get(f"{_ROOT}/missing/{self._name}")))
        if self._seen and store.check(f"{_ROOT}/differs/{self._seen}"):
            text, ranks = json.loads(store.get(f"{_ROOT}/differs/{self._seen}"))
            self._end(MismatchError(text, ranks), range(1, self._size), min(_LONG_FAREWELL, self._timeout / 2))
        self._heed_refusal()

    def _publish(self, entries: list[str]) -> None:
        if entries == self._entries:
            return
        fresh = [entry for entry in entries[1:] if entry and entry not in self._entries]
        self._entries = entries
        self._store.set(f"{_ROOT}/list", json.dumps([self._name, *entries]))
        for entry in fresh:
            self._store.set(f"{_ROOT}/answer/{json.loads(entry)[0]}", self._name)

    def _heed_refusal(self) -> None:
        """Ends the start where a rank has refused its environment, unless it comes meanwhile: it was an earlier start's then."""
        told = self._store.get(REFUSED) if self._store.check(REFUSED) else _NOTHING
        if told != self._refusal:
            self._refusal, self._refused_since = told, time.monotonic()
        number, peer, text = json.loads(told)
        if not number or time.monotonic() - self._refused_since < min(_SETTLED, self._timeout / 8):
            return
        self._store.set(f"{REFUSED}/{number}/{self._rank}", "1")
        try:
            self._end(
                RankLostError(
                    f"rank {peer} cannot start, for it refuses what it was given: {text}",
                    [int(peer)] if peer.isdecimal() and int(peer) < self._size else [],
                ),
                [r for r in range(1, self._size) if str(r) != peer],
                min(_LONG_FAREWELL, self._timeout / 2),
            )
        finally:
            if self._rank == 0:
                # It has been heeded: the next start is another one.
                with contextlib.suppress(TimeoutError, RuntimeError):
                    self._store.set(REFUSED, _NOTHING)

    def _confirm(self) -> None:
        if not self._store.check(f"{_ROOT}/list"):
            return
        listed, *entries = json.loads(self._store.get(f"{_ROOT}/list"))
        self._listed = len(entries)
        if self._rank >= len(entries):
            # The list may be that of an earlier start; only a rank 0 that waits just now looks at this.
            if self._seen != listed:
                self._seen = str(listed)
                self._store.set(f"{_ROOT}/beyond/{listed}", json.dumps([self._rank, *self._about.told()]))
            return
        if entries[self._rank] != self._own:
            return
        # Rank 0 has read this rank's entry, so that its own is of this start, too.
        self._seen = str(listed)
        self._compare({0: _About.of(entries[0]), self._rank: self._about})
        if len(entries) == self._size:
            self._name, self._entries = self._seen, entries
            self._store.set(self._confirmed(self._rank), str(self._deadline - time.monotonic()))

    def _compare(self, found: dict[int, _About]) -> None:
        """Refuses a start whose ranks do not belong together, and reports that to all of them.

        Args:
            found: what ranks of this start have sent.

        Raises:
            MismatchError: if they do not.
        """
        try:
            sizes = {peer: f"WORLD_SIZE={about.size}" for peer, about in found.items() if about.size}
            if len(set(sizes.values())) > 1:
                raise mismatch(sizes, "set WORLD_SIZE to the number of processes on all of them")
            check_installed({peer: about.installed for peer, about in found.items()})
        except MismatchError as error:
            self._store.set(f"{_ROOT}/differs/{self._seen}", json.dumps([str(error), list(error.ranks)]))
            self._end(error, range(1, self._size), min(_LONG_FAREWELL, self._timeout / 2))

    def _confirmed(self, rank: int) -> str:
        return f"{_ROOT}/confirmed/{self._name}/{rank}"

    def _unconfirmed(self) -> list[int]:
        return [r for r in range(1, self._size) if not self._store.check(self._confirmed(r))]

    def _give_up(self, missing: Sequence[int]) -> NoReturn:
        if self._name:
            self._store.set(f"{_ROOT}/missing/{self._name}", json.dumps(list(missing)))
        other = f" (the last start there had WORLD_SIZE={self._listed})" if self._listed not in (0, self._size) else ""
        error = CollectiveTimeoutError(
            f"not all {self._size} ranks arrived within {self._timeout:g} s: {missing=}{other}; see that they started, or raise "
            "timeout=",
            missing,
        )
        self._end(error, [r for r in range(1, self._size) if r not in missing], min(_FAREWELL, self._timeout / 8))

    def _end(self, error: CommunicationError, here: Iterable[int], patience: float) -> NoReturn:
        """Raises, on rank 0 after others have read why: its process may hold the store."""
        if self._seen:
            self._store.set(f"{_ROOT}/heard/{self._seen}/{self._rank}", "1")
        until = time.monotonic() + patience
        while self._rank == 0 and time.monotonic() < until:
            if all(self._store.check(f"{_ROOT}/heard/{self._seen}/{r}") for r in here):
                break
            time.sleep(_POLL)
        raise error


@dataclass(frozen=True)
class _About:
    """What has to be the same on all ranks.

    Attributes:
        size: WORLD_SIZE; 0 if the rank has not sent it.
        installed: the package.
    """

    size: int
    installed: Installed

    def told(self) -> list[Any]:
        return [self.size, self.installed.told()]

    @classmethod
    def parse(cls, size: Any = 0, installed: Any = None, *_: Any) -> _About:
        return cls(size if isinstance(size, int) else 0, Installed.parse(installed))

    @classmethod
    def of(cls, entry: str) -> _About:
        fields = json.loads(entry)
        return cls.parse(*(fields[4] if len(fields) > 4 else ()))
