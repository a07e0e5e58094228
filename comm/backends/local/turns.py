"""Gives the turn to one thread at a time, chosen by a seed, and moves a virtual clock on when all threads wait."""

from __future__ import annotations

import random
import sys
import threading
from math import inf

from bagua_kernels.comm.backends.local.runner import Runner, VirtualLock, describe
from bagua_kernels.errors import DeadlockError


class Turns:
    """Whose turn it is. Only the thread that has the turn changes anything here, apart from `stop`.

    Args:
        draws: where the choices come from.
        most: number of choices at one moment of virtual time that is taken for an endless loop.

    Attributes:
        now: virtual time in seconds.
        choices: number of choices so far.
        trace: for each choice the time, the chosen thread and the waiting point at which it stood.
        errors: what the functions of threads raised, in order.
        stopped: why no thread may go on; an empty text while all is well.
        over: set when all threads have ended or `stop` was called.
        running: the thread that has the turn; None while nothing runs.
        runners: threads that have not ended, in the order in which they were started.
    """

    def __init__(self, draws: random.Random, most: int) -> None:
        self.now = 0.0
        self.choices = 0
        self.trace: list[tuple[float, str, str]] = []
        self.errors: list[BaseException] = []
        self.stopped = ""
        self.over = threading.Event()
        self.running: Runner | None = None
        self.runners: list[Runner] = []
        self._draw = draws.random
        self._most = most
        self._first = 0  # the first choice at this moment of virtual time
        self._ready: list[Runner] = []
        self._asleep: list[Runner] = []
        self._passing = threading.Lock()  # between the thread that passes the turn on and `stop`

    def current(self) -> Runner:
        """Returns the calling thread, which has the turn; raises for any other thread."""
        if self.stopped:
            raise DeadlockError(self.stopped)
        runner = self.running
        if runner is None or runner.ident != threading.get_ident():
            raise RuntimeError(
                f"thread {threading.current_thread().name!r} waits by the clock of a Schedule that has not started it: "
                "start it with schedule.thread(target, name).start(), on a thread that the schedule runs"
            )
        return runner

    def add(self, runner: Runner) -> None:
        """Lets a new thread take part; `begin` is the first thing that it does."""
        with self._passing:
            if self.stopped:
                raise DeadlockError(self.stopped)
            self.runners.append(runner)
        self._ready.append(runner)

    def begin(self, runner: Runner) -> bool:
        """Waits, on a new thread, for its first turn; returns False if the run has been stopped."""
        runner.ident = threading.get_ident()
        runner.gate.acquire()
        return not self.stopped

    def start(self) -> None:
        """Gives the first turn, from outside."""
        self.over.clear()
        self._first = self.choices
        self._give(self._choose())

    def end(self, runner: Runner) -> None:
        """Passes the turn on for good."""
        with self._passing:
            runner.ended = True
            self.runners.remove(runner)
            if self.stopped:
                return
        for joiner in runner.joiners:
            self._wake(joiner)
        if self.runners:
            if not any(each.main for each in self.runners):
                self._first = self.choices
            self._give(self._choose())
        else:
            self.running = None
            self.over.set()

    def stop(self, reason: str) -> None:
        """Makes every thread raise `DeadlockError` at its next waiting point; from any thread."""
        with self._passing:
            if self.stopped:
                return
            self.stopped = reason
            self.errors.append(DeadlockError(reason))
            for runner in self.runners:
                if runner is not self.running:
                    runner.gate.release()
        self.over.set()

    def go_on(self, me: Runner, point: str) -> None:
        """Lets the seed choose between this thread and the others that can run."""
        me.point = point
        self._ready.append(me)
        self._pass_turn(me)

    def take(self, me: Runner, lock: VirtualLock) -> None:
        """Waits for a lock, and takes it."""
        me.lock, me.depth = lock, 1
        self.go_on(me, "acquire")

    def free(self, lock: VirtualLock) -> None:
        """Releases a lock; threads that wait for it can run again."""
        lock.owner, lock.depth = None, 0
        self._ready += lock.queue
        lock.queue.clear()

    def wait(self, me: Runner, point: str, place: list[Runner], timeout: float | None) -> bool:
        """Waits in a list until `wake_all` of it; returns False if the time ran out before."""
        me.point, me.woken = point, False
        if timeout is not None and timeout <= 0:
            self._ready.append(me)
        else:
            me.deadline = inf if timeout is None else self.now + timeout
            me.place = place
            place.append(me)
        self._pass_turn(me)
        return me.woken

    def sleep(self, me: Runner, seconds: float) -> None:
        """Waits for a time."""
        self.wait(me, "sleep", self._asleep, seconds)

    def wake_all(self, place: list[Runner]) -> None:
        """Wakes all threads that wait in a list, and empties it."""
        for runner in place:
            self._wake(runner)
        place.clear()

    def report(self, running: Runner | None = None) -> str:
        """Returns what each thread that has not ended waits for, but for `running`: where that one is."""
        frames = sys._current_frames()
        return "; ".join(describe(each, frames.get(each.ident or 0), each is running) for each in self.runners)

    def _wake(self, runner: Runner) -> None:
        runner.place, runner.deadline, runner.woken = None, inf, True
        self._ready.append(runner)

    def _pass_turn(self, me: Runner) -> None:
        following = self._choose()
        if following is not me and self._give(following):
            me.gate.acquire()
        if self.stopped:
            raise DeadlockError(self.stopped)
        if me.error is not None:
            error, me.error = me.error, None
            raise error

    def _give(self, runner: Runner | None) -> bool:
        with self._passing:
            if self.stopped or runner is None:
                return False
            self.running = runner
            runner.gate.release()
            return True

    def _choose(self) -> Runner | None:
        """Takes one of the threads that can run out of their list, None if the run had to be stopped."""
        ready = self._ready
        while True:
            while ready:
                number = int(self._draw() * len(ready)) if len(ready) > 1 else 0
                chosen, ready[number] = ready[number], ready[-1]
                ready.pop()
                lock = chosen.lock
                if lock is not None:
                    if lock.owner is not None:
                        lock.queue.append(chosen)
                        continue
                    lock.owner, lock.depth, chosen.lock = chosen, chosen.depth, None
                self.choices += 1
                self.trace.append((self.now, chosen.name, chosen.point))
                if self.choices - self._first > self._most:
                    self._endless()
                    return None
                return chosen
            self._jump()
            if self.stopped:
                return None

    def _jump(self) -> None:
        """Moves the clock to the earliest deadline, for no thread can run."""
        due = min((each.deadline for each in self.runners), default=inf)
        if due == inf:
            self._deadlock()
            return
        self.now = due
        if any(each.main for each in self.runners):
            self._first = self.choices
        for runner in self.runners:
            if runner.deadline <= due and runner.place is not None:
                runner.place.remove(runner)
                self._wake(runner)
                runner.woken = False

    def _deadlock(self) -> None:
        text = f"deadlock at {self.now:g} s: every thread waits without a deadline: {self.report()}"
        for runner in self.runners:
            runner.error = DeadlockError(text)
            if runner.place is not None:
                runner.place.remove(runner)
                self._wake(runner)
            elif runner.lock is not None and runner.point == "acquire":
                runner.lock.queue.remove(runner)
                runner.lock = None
                self._ready.append(runner)
            # A thread that takes its lock again after a wait raises once another thread, which raises, has released it.
        if not self._ready:
            self.stop(text)

    def _endless(self) -> None:
        if any(each.main for each in self.runners):
            reason = (
                f"{self._most} choices have not moved the clock from {self.now:g} s, so threads wait in a loop: sleep"
            )
        else:
            reason = (
                f"{self._most} choices after the end of all functions of the run, threads that they started still run"
            )
            reason += ": end them before"
        self.stop(f"{reason}, or raise most=; {self.report()}")
