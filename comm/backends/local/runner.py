"""A thread of a `Schedule`, and what it waits for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import FrameType

from bagua_kernels.comm.work import Work
from bagua_kernels.errors import DeadlockError

_HERE = str(Path(__file__).parent)
_COMM = str(Path(__file__).parents[2])


class VirtualLock:
    """A re-entrant lock among scheduled threads: who holds it how many times, and who waits for it."""

    def __init__(self) -> None:
        self.owner: Runner | None = None
        self.depth = 0
        self.queue: list[Runner] = []


def _closed_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


@dataclass(eq=False, slots=True)
class Runner:
    """A thread of the schedule.

    Attributes:
        name: name of the thread.
        main: True if the run was started with it; False for a thread that another one started.
        gate: a lock that stays locked, except while the turn is on its way to this thread.
        ident: Python's number of the thread, once it has begun.
        point: the waiting point at which it stands, such as "acquire".
        lock: the lock that it takes with its next turn.
        depth: how many times it will hold that lock.
        place: the list in which it waits for another thread or for a time; None if it waits for nothing but `lock`.
        deadline: the virtual time at which it leaves `place`.
        woken: True if another thread took it out of `place`.
        joiners: threads that wait for its end.
        error: what its next turn raises.
        ended: True once its function has returned or raised.
    """

    name: str
    main: bool = False
    gate: threading.Lock = field(default_factory=_closed_gate)
    ident: int | None = None
    point: str = "start"
    lock: VirtualLock | None = None
    depth: int = 1
    place: list[Runner] | None = None
    deadline: float = inf
    woken: bool = False
    joiners: list[Runner] = field(default_factory=list)
    error: DeadlockError | None = None
    ended: bool = False


def describe(runner: Runner, frame: FrameType | None, running: bool) -> str:
    """Returns what one thread does, and where."""
    frames = [each for each in _frames(frame) if each.f_code.co_filename not in _OWN]
    if runner.ident is None or not frames:
        return f"{runner.name} has not begun"
    objects = (each.f_locals.get("self") for each in frames)
    works = [getattr(each, "name", "") or getattr(each, "_name", "") for each in objects if isinstance(each, Work)]
    what = next(filter(None, works), frames[0].f_code.co_qualname)
    # The caller's line rather than a line of the communicator.
    outer = next((each for each in frames if not each.f_code.co_filename.startswith(_COMM)), frames[0])
    place = f"{Path(outer.f_code.co_filename).name}:{outer.f_lineno}"
    if running:
        return f"{runner.name} is in {what} ({place})"
    verb = "waits in" if what == frames[0].f_code.co_qualname else "waits for"
    until = "" if runner.deadline == inf else f" until {runner.deadline:g} s"
    owner = runner.lock.owner if runner.lock is not None else None
    lock = "" if owner is None else f" for the lock that {owner.name} holds"
    return f"{runner.name} {verb} {what}{lock}{until} ({place})"


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


# Their frames lie below the wait of every thread.
_OWN = {__file__, f"{_HERE}/turns.py", f"{_HERE}/schedule.py", threading.__file__}
