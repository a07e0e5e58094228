"""The one thread of a rank that serves a mailbox: letters, timers, and work that others ask for."""

from __future__ import annotations

import contextlib
import math
import threading
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bagua_kernels.comm.failures.forked import forget_after_fork
from bagua_kernels.comm.failures.stillness import Stillness, Stir
from bagua_kernels.comm.mailbox.clock import RealClock
from bagua_kernels.comm.mailbox.mailbox import Mailbox, late_error, lost_error
from bagua_kernels.errors import CommunicationError, culprits_of, follow_up

Handler = Callable[[int, bytes], None]

_STIRS = 32  # questions to a rank what it moves within the timeout
_LOOKS = 4  # looks at lost ranks within the timeout, where something is waited for without a limit
_FAREWELL = 5.0  # seconds for which the end of a courier that nobody has ended is waited for
_PATIENCE = 1.0  # seconds beyond the timeout, in which a courier may be within an exchange and answer nobody
# Kinds of letters that every courier answers.
_PING, _PONG = 255, 254


@dataclass
class _Timer:
    seconds: float
    function: Callable[[], None]
    due: float


class Courier:
    """Serves a mailbox on a thread of its own. An error there ends it, and is raised on the threads that wait for it.

    Functions given to it run on its thread, one at a time, without any lock. What they share with other threads is protected by
    `changed`, which is notified after each of them.

    Attributes:
        mailbox: whose letters it takes. No other thread takes any.
        changed: a lock, and what other threads wait for.
        label: the name of the ranges in which profilers show its exchanges.
    """

    def __init__(self, mailbox: Mailbox, name: str = "courier") -> None:
        """Makes the thread; `start` starts it."""
        self.mailbox = mailbox
        self.changed = mailbox.clock.condition()
        self.label = f"bagua_kernels {name}"
        self._handlers: dict[int, Handler] = {_PING: lambda sender, _: self.post(sender, _PONG, b""), _PONG: _ignore}
        self._heard: dict[int, float] = {}
        self._owing: dict[int, float] = {}
        self._asked = 0.0
        # For each rank its last report of transfers, and when that changed.
        self._stirs: dict[int, tuple[Stir | None, float]] = {}
        self._asked_stir: dict[int, float] = {}
        self._expected: tuple[int, float, Stillness] | None = None
        self._works: list[Callable[[], bool]] = []
        self._timers: list[_Timer] = []
        self._moment = math.inf
        self._ending = False
        self._lost: Mapping[int, str] = {}
        self._failure: BaseException | None = None
        self._thread = mailbox.clock.thread(self._run, f"bagua_kernels {name} of rank {mailbox.rank}")
        forget_after_fork(self)

    def on(self, kind: int, handler: Handler) -> None:
        """Sets what is called with the sender and the contents of each letter of a kind, 0 to 255."""
        self._handlers[kind] = handler

    def work(self, function: Callable[[], bool]) -> None:
        """Adds a function that does a piece of what is to be done; it is called until it returns False."""
        self._works.append(function)

    def every(self, seconds: float, function: Callable[[], None]) -> None:
        """Calls a function at times that lie so far apart; missed calls are skipped."""
        self._timers.append(_Timer(seconds, function, self.mailbox.clock.now() + seconds))
        self.wake()

    def look_at(self, moment: float) -> None:
        """Lets the courier look whether there is work at a moment by the mailbox's clock, once; on the courier's thread."""
        self._moment = min(self._moment, moment)

    def post(self, dst: int, kind: int, contents: bytes) -> None:
        """Sends a letter of a kind.

        Raises:
            CommunicationError: the courier has ended, or one of its kinds, which names the rank at fault.
        """
        with self.telling():
            self.mailbox.post(dst, bytes([kind]) + contents)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Lets the courier look whether there is work."""
        self.mailbox.wake()

    def expect(self, rank: int, since: float, name: str) -> None:
        """Raises if a rank that owes this one something, and whose exchange nobody waits for, is lost or late.

        Args:
            rank: which owes it.
            since: when that began, by the mailbox's clock; bytes that this rank moves put the end off, see `Stillness`.
            name: what it is, for the error.
        """
        if rank in self._lost:
            raise lost_error(name, [rank], self._lost)
        if self._expected is None or self._expected[:2] != (rank, since):
            self._expected = rank, since, Stillness(since)
        still, now = self._expected[2], self.mailbox.clock.now()
        if (stir := self._stir(rank, now)) is not None:
            still.other(rank, stir, now)
        if now - still.since() > self.mailbox.timeout:
            raise late_error(name, self.mailbox.timeout, [rank], self._lost)

    @property
    def lost(self) -> Mapping[int, str]:
        """The ranks that are lost, with the reasons, of which all that they had sent is handled."""
        return self._lost

    def silent(self, ranks: Collection[int]) -> list[int]:
        """Returns those of some ranks that have answered and moved nothing for the timeout; asks all of them, now and then.

        On the courier's thread.

        Args:
            ranks: which owe this one something now; the time of each counts from the first call that names it.
        """
        now, timeout = self.mailbox.clock.now(), self.mailbox.timeout
        self._owing = {rank: self._owing.get(rank, now) for rank in ranks}
        if ranks and now >= self._asked + timeout / _LOOKS:
            self._asked = now
            for rank in ranks:
                self.post(rank, _PING, b"")
        return [rank for rank, since in self._owing.items() if self._is_silent(rank, since, now)]

    def stirred(self, ranks: Collection[int]) -> float:
        """Returns when something last moved to, from or at some ranks, by their answers; -inf where nothing has."""
        now = self.mailbox.clock.now()
        return max((self._stirred(rank, now) for rank in ranks if rank not in self._lost), default=-math.inf)

    def _stirred(self, rank: int, now: float) -> float:
        stir = self._stir(rank, now)
        last, at = self._stirs.setdefault(rank, (stir, -math.inf))
        if stir is not None and (last is None or stir.moved != last.moved):
            self._stirs[rank] = stir, (at := now)
        return at

    def _stir(self, rank: int, now: float) -> Stir | None:
        if now >= self._asked_stir.get(rank, -math.inf) + self.mailbox.timeout / _STIRS:
            self._asked_stir[rank] = now
            self.mailbox.ask(rank)
        return self.mailbox.stir(rank)

    def _is_silent(self, rank: int, since: float, now: float) -> bool:
        # A courier that is within a long exchange answers nobody, but moves bytes.
        heard = max(since, self._heard.get(rank, 0.0), self._stirred(rank, now))
        return now - heard > self.mailbox.timeout + _PATIENCE

    def check(self) -> None:
        """Raises what ended the courier, as an error of this thread.

        Raises:
            CommunicationError: or one of its kinds, which names the rank at fault.
        """
        if self._failure is not None:
            raise follow_up(
                self._failure, f"the courier of rank {self.mailbox.rank} ended: {self._failure}"
            ) from self._failure

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Raises, where the block fails since the courier has just left the mailbox, what ended the courier.

        Raises:
            CommunicationError: as `check`.
        """
        try:
            yield
        except CommunicationError:
            self.check()
            raise

    def check_serving(self) -> None:
        """As `check`, and raises too if the courier is about to end; for waits.

        Raises:
            CommunicationError: or one of its kinds, which names the rank at fault.
        """
        self.check()
        if self._ending:
            raise CommunicationError("the courier was ended while this rank waited: close it after all waits")

    def wait_for(self, predicate: Callable[[], bool], needed: Callable[[], Collection[int]] | None = None) -> None:
        """Waits until something is so; the caller does not hold `changed`.

        Args:
            predicate: called with `changed` held.
            needed: returns the ranks that are waited for, in an endless wait. They are asked whether they are there, meanwhile.
                None if the courier's own exchanges, which have a timeout, end the wait.

        Raises:
            RankLostError: a rank that is waited for is lost.
            CollectiveTimeoutError: a rank that is waited for does not answer.
            CommunicationError: the courier has ended.
        """
        clock, timeout = self.mailbox.clock, self.mailbox.timeout
        began = asked = clock.now()
        with self.changed:
            while not predicate():
                self.check_serving()
                if needed is not None and (gone := [rank for rank in needed() if rank in self._lost]):
                    raise lost_error("a wait for other ranks", gone, self._lost)
                now = clock.now()
                if needed is not None and now >= asked:
                    for rank in needed():
                        if self._is_silent(rank, began, now):
                            raise late_error("a wait for other ranks", timeout, [rank], self._lost)
                        self.post(rank, _PING, b"")
                    asked = now + timeout / _LOOKS
                self.changed.wait(timeout / _LOOKS if needed is None else min(timeout / _LOOKS, _PATIENCE / 2))

    def end(self, reason: str = "") -> None:
        """Ends the thread and leaves the mailbox; calling it again does nothing. A piece of work under way is given up."""
        self._end(reason, self.mailbox.timeout)

    def end_with(self, owner: object) -> None:
        """Ends the thread when an object is deleted that nobody has closed, or when the process exits.

        Functions given to the courier must not hold the object; `weakly` makes such ones of its methods.
        """
        weakref.finalize(owner, self._leave)

    def forget(self) -> None:
        """For a forked child, which lacks the thread, and in which nobody would release the lock."""
        self.changed = self.mailbox.clock.condition()
        self._ending = True

    def _leave(self) -> None:
        self._ending = True
        # Objects are deleted on any thread, and those of a test's clock run by turns.
        if isinstance(self.mailbox.clock, RealClock):
            self._end("its algorithm was deleted, or its process exits", _FAREWELL)

    def _end(self, reason: str, patience: float) -> None:
        with self.changed:
            self._ending = True
            self.changed.notify_all()
        self.mailbox.leave(reason)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(min(patience, self.mailbox.timeout))

    def _run(self) -> None:
        device = self.mailbox.device
        # On a GPU exchanges must not hold up what training has queued.
        with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext():
            self._serve()

    def _serve(self) -> None:
        try:
            while not self._ending:
                # A loss brings no letter, and may be what ends a wait.
                self._handle(self.mailbox.take(self._until_timer(), self._lost))
                self._call_timers()
                for function in self._works:
                    while not self._ending and function():
                        self._notify()
                self._notify()
        except BaseException as error:
            if not self._ending:
                _clear(error)
                self._failure = error
                with contextlib.suppress(CommunicationError):
                    self.mailbox.leave(f"its courier ended: {error}", culprits_of(error))
        self._notify()

    def _handle(self, letter: tuple[int, bytes] | None) -> None:
        """Handles a letter and all that are there, before anything is said to be late; then looks who is lost."""
        while True:
            while letter is not None:
                sender, contents = letter
                self._heard[sender] = self.mailbox.clock.now()
                self._handlers[contents[0]](sender, contents[1:])
                letter = self.mailbox.take(0.0)
            lost = self.mailbox.lost()
            # What these had sent has arrived, but perhaps after the last look.
            if lost == self._lost or (letter := self.mailbox.take(0.0)) is None:
                self._lost = lost
                return

    def _until_timer(self) -> float:
        now = self.mailbox.clock.now()
        due = min((timer.due for timer in list(self._timers)), default=math.inf)
        due, self._moment = min(due, self._moment), math.inf
        return min(max(0.0, due - now), self.mailbox.timeout / _LOOKS)

    def _call_timers(self) -> None:
        for timer in list(self._timers):
            now = self.mailbox.clock.now()
            if now >= timer.due:
                timer.function()
                timer.due = max(timer.due + timer.seconds, self.mailbox.clock.now())

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()


def _clear(error: BaseException) -> None:
    """Frees what the functions that an error has ended held: it would keep an object that `weakly` must not hold."""
    links: BaseException | None = error
    while links is not None:
        traceback.clear_frames(links.__traceback__)
        links = links.__cause__ or links.__context__


def _ignore(sender: int, contents: bytes) -> None:
    """For answers, of which only the arrival counts."""


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what calls a method of an object, as long as that exists; it does nothing afterwards.

    A courier's thread holds the functions that it calls. With plain methods, no object that has a courier would be deleted.
    """
    found = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        bound = found()
        return None if bound is None else bound(*arguments)

    return call
