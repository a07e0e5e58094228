"""A clock for tests of threads: one thread runs at a time, chosen by a seed, and nobody waits in real time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from bagua_kernels.comm.backends.local.runner import Runner, VirtualLock
from bagua_kernels.comm.backends.local.turns import Turns

_LONGEST = 600.0  # seconds of real time for one run
_UNWINDING = 5.0  # seconds of real time in which stopped threads raise their errors and end


class Schedule:
    """Runs threads one at a time, in an order that a seed decides, with a virtual clock.

    At each waiting point the seed chooses the next thread among those that can run. Waiting points are `acquire`, `wait`
    and `notify_all` of a condition, `sleep`, `pass_on`, `join`, and the start and the end of a thread. Computation takes
    no virtual time. When all threads wait, the clock jumps to the earliest deadline. The same seed gives the same order.

        for seed in range(200):
            run_ranks(4, protocol, schedule=Schedule(seed))

    All threads of a run wait through this clock: a thread that blocks elsewhere, as in `threading.Event.wait`, stops the run.

    Args:
        seed: decides every choice.
        latency: draws the seconds after which a letter of a `Mailbox` arrives, such as `lambda draws: draws.uniform(0, 3)`.
            Letters of one rank to another stay in order. By default they arrive at once.
        patience: seconds of real time that one thread may compute, or block elsewhere, between two waiting points.
        most: number of choices that may be made without any move of the clock; more are taken for an endless loop.
    """

    def __init__(
        self,
        seed: int,
        *,
        latency: Callable[[random.Random], float] | None = None,
        patience: float = 30.0,
        most: int = 1_000_000,
    ) -> None:
        self.seed = seed
        self._latency = latency
        self._patience = patience
        self._draws = random.Random(seed)
        self._turns = Turns(self._draws, most)
        self._threads: list[ScheduledThread] = []

    @property
    def trace(self) -> list[tuple[float, str, str]]:
        """For each choice: virtual time, name of the chosen thread, and the waiting point at which it stood."""
        return self._turns.trace

    @property
    def errors(self) -> list[BaseException]:
        """What functions of threads raised in the last run, in order; functions may append what they have handled."""
        return self._turns.errors

    def now(self) -> float:
        """Returns the virtual time: seconds since the first run began."""
        return self._turns.now

    def condition(self) -> ScheduledCondition:
        """Makes a condition for the threads of this schedule; outside of a run it can be taken, but not waited for."""
        return ScheduledCondition(self._turns)

    def latency(self) -> float:
        """See `Clock.latency`."""
        return 0.0 if self._latency is None else self._latency(self._draws)

    def thread(self, target: Callable[[], object], name: str) -> ScheduledThread:
        """Makes a thread of this schedule, to be started by another one, and to end before the run."""
        return self._made(Runner(name), target)

    def sleep(self, seconds: float) -> None:
        """Waits for seconds of virtual time."""
        self._turns.sleep(self._turns.current(), seconds)

    def pass_on(self) -> None:
        """Lets the seed choose who goes on: this thread, or another one that can run."""
        self._turns.go_on(self._turns.current(), "pass on")

    def run(self, targets: Mapping[str, Callable[[], object]]) -> None:
        """Runs functions by name, each on a thread, until all threads have ended; again only after the end of a run.

        Raises:
            BaseException: what the first function to fail raised.
            DeadlockError: if threads wait for one another, in a loop, or elsewhere.
        """
        turns = self._turns
        if turns.stopped or turns.runners:
            raise RuntimeError(f"{self!r} runs already, or was stopped: make another one")
        if not targets:
            return
        turns.errors.clear()
        self._threads = []
        try:
            for name, target in targets.items():
                self._made(Runner(name, main=True), target).enter()
            turns.start()
            self._watch()
        except BaseException as error:
            turns.stop(f"the thread that called run() raised {error!r}")
            raise
        self._join()
        if turns.errors:
            turns.errors[0].add_note(f"under {self!r}")
            raise turns.errors[0]

    def __repr__(self) -> str:
        """Returns the seed and the time, with which a failure can be repeated."""
        return f"Schedule({self.seed}) at {self._turns.now:g} s after {self._turns.choices} choices"

    def _made(self, runner: Runner, target: Callable[[], object]) -> ScheduledThread:
        thread = ScheduledThread(self._turns, runner, target)
        self._threads.append(thread)
        return thread

    def _join(self) -> None:
        """Waits for threads that are about to end, but not for one that blocks elsewhere."""
        end = time.monotonic() + _UNWINDING
        for thread in self._threads:
            if thread.ident is not None and thread.runner is not self._turns.running:
                thread.join(max(0.0, end - time.monotonic()))

    def _watch(self) -> None:
        """Waits for the end of all threads, and stops them if one has kept its turn for too long."""
        turns = self._turns
        end = time.monotonic() + _LONGEST
        choices, since = -1, 0.0
        while not turns.over.wait(self._patience / 8):
            now = time.monotonic()
            if turns.choices != choices:
                choices, since = turns.choices, now
            elif now - since > self._patience and turns.running is not None:
                turns.stop(
                    f"{turns.running.name} has reached no waiting point for {self._patience:g} s of real time: make it wait "
                    f"through the schedule instead of elsewhere, or raise patience=; {turns.report(turns.running)}"
                )
            if now > end:
                turns.stop(f"threads still run after {_LONGEST:g} s of real time; {turns.report(turns.running)}")


class ScheduledThread(threading.Thread):
    """A thread that runs when it has the turn."""

    def __init__(self, turns: Turns, runner: Runner, target: Callable[[], object]) -> None:
        super().__init__(name=runner.name, daemon=True)
        self.runner = runner
        self._turns = turns
        self._function = target

    def start(self) -> None:
        """Starts it; the caller keeps the turn."""
        self._turns.current()
        self.enter()

    def enter(self) -> None:
        """Starts it from outside, before the run begins."""
        self._turns.add(self.runner)
        super().start()

    def run(self) -> None:
        """Runs the function, from the first turn of this thread on."""
        try:
            if self._turns.begin(self.runner):
                self._function()
        except BaseException as error:  # of whatever kind: Schedule.run raises it
            error.add_note(f"raised by thread {self.name!r}")
            self._turns.errors.append(error)
        finally:
            self._turns.end(self.runner)

    def join(self, timeout: float | None = None) -> None:
        """Waits until it has ended, on a thread of the schedule within seconds of virtual time."""
        running = self._turns.running
        if running is not None and running.ident == threading.get_ident() and not self.runner.ended:
            self._turns.wait(running, "join", self.runner.joiners, timeout)
            if not self.runner.ended:
                return
        super().join(timeout)

    def is_alive(self) -> bool:
        """Returns True from its start until its function has ended."""
        return super().is_alive() and not self.runner.ended


class ScheduledCondition(VirtualLock):
    """A condition of a schedule; see `Condition`."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self._waiters: list[Runner] = []

    def acquire(self) -> bool:
        """See `Condition.acquire`."""
        if self._is_idle():
            return True
        me = self._turns.current()
        if self.owner is me:
            self.depth += 1
        else:
            self._turns.take(me, self)
        return True

    def release(self) -> None:
        """See `Condition.release`."""
        # A thread that was stopped in `wait` does not hold the lock any more.
        if self._is_idle() or self._turns.stopped:
            return
        self._holder()
        self.depth -= 1
        if not self.depth:
            self._turns.free(self)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def wait(self, timeout: float | None = None) -> bool:
        """See `Condition.wait`."""
        me = self._holder()
        me.lock, me.depth = self, self.depth
        self._turns.free(self)
        return self._turns.wait(me, "wait", self._waiters, timeout)

    def notify_all(self) -> None:
        """See `Condition.notify_all`."""
        if self._is_idle():
            return
        me = self._holder()
        self._turns.wake_all(self._waiters)
        self._turns.go_on(me, "notify")

    def _is_idle(self) -> bool:
        return self._turns.running is None and not self._turns.stopped

    def _holder(self) -> Runner:
        me = self._turns.current()
        if self.owner is not me:
            raise RuntimeError(f"{me.name} does not hold the lock of this condition: use it in a `with` block")
        return me
