"""Random trainings that ranks join and leave at random moments, by all algorithms that heal.

    python -m tests.algorithms.joining_fuzz --schedules 1000 --seed 0

Each training is drawn from its seed: the algorithm, the ranks, which processes join, with a draft or without, and who ends.
`--seed SEED --schedules 1` repeats one. Ranks are threads, joined by sockets, so that a fault may need some tries.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from bagua_kernels.algorithms import Draft, algorithm
from bagua_kernels.algorithms.wrapping import supply
from bagua_kernels.comm import LocalCommunicator, Membership, run_ranks
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.collectives import Collectives
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.membership.arrival import arrive
from bagua_kernels.comm.membership.line import MemberLine
from bagua_kernels.errors import CommunicationError
from tests import limits
from tests.algorithms.membership_fuzz import SPECS, EndedError, Moment, end_of_process, own_threads, run
from tests.algorithms.test_healing import ALIKE, parts_of, step_of, vector, wrapped
from tests.comm.membership.over_sockets import ends, listening

SECRET = Secret.from_text("known to the ranks of this fuzz alone")
STEPS = 40
PATIENCE = 20.0  # seconds for which a rank waits for another
_ARRIVAL = 5.0  # seconds for which a process asks to join
_PAUSE = 0.01  # seconds of a step, beside its arithmetic
_PIECE = 512  # bytes that a new member gets in a step


@dataclass
class Joiner:
    """A process that joins.

    Attributes:
        step: of the ranks that train, after which it asks.
        has_draft: True if it fetches a draft before.
        end: when it ends; None if it stays.
    """

    step: int
    has_draft: bool
    end: Moment | None = None


@dataclass
class Visit:
    """What is drawn from a seed.

    Attributes:
        spec: of the algorithm.
        ranks: their number at first.
        ends: when some of them end.
        joiners: who joins.
    """

    spec: str
    ranks: int
    ends: dict[int, Moment] = field(default_factory=dict)
    joiners: list[Joiner] = field(default_factory=list)


def draw(seed: int, specs: Sequence[str] = SPECS) -> Visit:
    """Returns the training of a seed."""
    dice = random.Random(seed)
    made = Visit(dice.choice(specs), dice.randint(3, 6))
    together = dice.randrange(2, STEPS // 2)
    for rank in dice.sample(range(made.ranks), dice.choice((0, 1, 1, 2))):
        step = together + dice.randint(0, 3) if dice.random() < 0.6 else dice.randrange(STEPS)
        made.ends[rank] = Moment(step, dice.choice((0, dice.randint(1, 30))))
    for _ in range(dice.choice((1, 1, 2, 3))):
        step = together if dice.random() < 0.6 else dice.randrange(STEPS // 2)
        end = Moment(0, dice.randint(0, 80)) if dice.random() < 0.25 else None
        made.joiners.append(Joiner(step, dice.random() < 0.5, end))
    return made


class Party:
    """A training that is under way.

    Attributes:
        found: what each member has come to.
        joined: how many processes have joined.
    """

    def __init__(self, visit: Visit) -> None:
        """Starts nothing yet."""
        self.visit = visit
        self.found: dict[int, dict[str, Any]] = {}
        self.errors: list[str] = []
        self.joined = 0
        self._doors: dict[int, tuple[str, int]] = {}
        self._moments: dict[str, Moment] = {}
        self._members: dict[str, Membership] = {}
        self._anchors: dict[str, list[Any]] = {}
        self._threads = [
            threading.Thread(target=self._joins, args=(place, each), name=f"rank new {place}", daemon=True)
            for place, each in enumerate(visit.joiners)
        ]
        self._started: set[int] = set()
        self._lock = threading.Lock()

    def _act(self, communicator: Any) -> None:
        """Ends a member, at one of its operations; nothing that it does afterwards has an effect."""
        owner = getattr(communicator, "fuzz_owner", None)
        moment = None if owner is None else self._moments.get(owner)
        if owner is not None and moment is not None and (moment.has_come or moment.comes()):
            self._end(owner)
            raise EndedError(owner)

    def _end(self, owner: str, model: Any = None) -> None:
        """Does what the end of a process does, in the middle of connecting, too."""
        end_of_process(self._members[owner], *([] if model is None else [model]))
        for anchor in self._anchors.get(owner, []):
            anchor.abort("its process has ended")

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """In the block its moments come."""
        enter, pair, split, begin = (
            Collectives._enter,
            Collectives._enter_pair,
            StripedCommunicator._split,
            MemberLine.__init__,
        )

        def entered(communicator: Any, *arguments: Any, **options: Any) -> Any:
            self._act(communicator)
            return enter(communicator, *arguments, **options)

        def paired(communicator: Any, *arguments: Any, **options: Any) -> Any:
            self._act(communicator)
            return pair(communicator, *arguments, **options)

        def parted(communicator: Any, *arguments: Any, **options: Any) -> Any:
            made: Any = split(communicator, *arguments, **options)
            made.fuzz_owner = owner = getattr(communicator, "fuzz_owner", None)
            if owner is not None:
                # A process that ends ends what it is about to open, too.
                self._anchors.setdefault(owner, []).append(made)
            return made

        def begun(line: Any, anchor: Any, *arguments: Any) -> None:
            # Members connect on the threads that train.
            anchor.fuzz_owner = threading.current_thread().name
            self._anchors.setdefault(anchor.fuzz_owner, []).append(anchor)
            begin(line, anchor, *arguments)

        with contextlib.ExitStack() as stack:
            for kind, name, made in (
                (Collectives, "_enter", entered),
                (Collectives, "_enter_pair", paired),
                (StripedCommunicator, "_split", parted),
                (MemberLine, "__init__", begun),
                (algorithm, "_AT_ONCE", 0),
                (supply, "_LEAST", _PIECE),
                (supply, "_MOST", _PIECE),
            ):
                stack.enter_context(mock.patch.object(kind, name, made))
            yield

    def member(self, communicator: LocalCommunicator) -> None:
        """One of the first ranks."""
        name = communicator.rank
        owner = threading.current_thread().name
        with listening(communicator, SECRET, self._doors) as members:
            self._members[owner] = members
            net, optimizer = parts_of(self.visit.spec)
            self._train(owner, members, net, optimizer, self.visit.ends.get(name))

    def _joins(self, place: int, joiner: Joiner) -> None:
        """A process that joins."""
        owner = threading.current_thread().name
        net, optimizer = parts_of(self.visit.spec)
        try:
            draft = Draft(net, optimizer) if joiner.has_draft else None
            members = self._members[owner] = arrive([*self._doors.values()], SECRET, _ARRIVAL, draft)
        except CommunicationError:
            return  # the others have come to their end
        with self._lock:
            self.joined += 1
        try:
            self._train(owner, members, net, optimizer, joiner.end)
        except BaseException as error:
            self.errors.append("".join(traceback.format_exception(error)[-4:]))
            self._end(owner)

    def _train(
        self, owner: str, members: Membership, net: torch.nn.Module, optimizer: Any, moment: Moment | None
    ) -> None:
        model = None
        new = members.has_joined
        if moment is not None and new:
            self._moments[owner], moment.armed = moment, True
        try:
            model = wrapped(self.visit.spec, members, net, optimizer)
            optimizer = model.optimizer or optimizer
            step = model.stats().steps
            while step < STEPS:
                self._start(step)
                if moment is not None and not new and step == moment.step:
                    self._moments[owner], moment.armed = moment, True
                    if moment.after == 0:
                        moment.has_come = True
                        raise EndedError(owner)
                step_of(model, optimizer, members.name, step)
                time.sleep(_PAUSE)
                step += 1
            own, behind = vector(net), model.is_behind
            model.synchronize()
            self._moments.pop(owner, None)
            if moment is not None and moment.has_come:
                raise EndedError(owner)
            self.found[members.name] = {
                "own": own,
                "behind": behind,
                "mean": vector(net),
                "ranks": members.ranks,
                "steps": model.stats().steps,
            }
            model.close()
            ends(members)
        except BaseException:
            if moment is None or not moment.has_come:
                raise
            self._end(owner, model)

    def _start(self, step: int) -> None:
        """Starts those that are to join by now."""
        for place, each in enumerate(self.visit.joiners):
            with self._lock:
                if each.step > step or place in self._started:
                    continue
                self._started.add(place)
            self._threads[place].start()

    def wait(self) -> None:
        """Waits for those that join."""
        for place in self._started:
            self._threads[place].join(limits.seconds(2 * PATIENCE))
            if self._threads[place].is_alive():
                self.errors.append("a process that joins hangs")

    def problems(self) -> list[str]:
        """Returns what is wrong with what the members have come to."""
        wrong = [*self.errors]
        if not self.found:
            return [*wrong, "nobody came to the end"]
        first = self.found[min(self.found)]
        whole = [each["own"] for each in self.found.values() if not each["behind"]]
        for name, each in sorted(self.found.items()):
            if each["ranks"] != first["ranks"]:
                wrong.append(f"rank {name} has members {each['ranks']}, not {first['ranks']}")
            if not torch.equal(each["mean"], first["mean"]) or not each["mean"].isfinite().all():
                wrong.append(f"rank {name} has another mean")
        if self.visit.spec in ALIKE:
            if not all(torch.equal(each, whole[0]) for each in whole):
                wrong.append("ranks have other parameters")
            if {each["steps"] for each in self.found.values()} != {STEPS}:
                wrong.append(f"steps: { {name: each['steps'] for name, each in self.found.items()} }")
        return wrong


def problems_of(visit: Visit) -> tuple[list[str], int]:
    """Returns what is wrong with a training, an exception among it, and how many processes have joined."""
    faulthandler.dump_traceback_later(limits.seconds(8 * PATIENCE), exit=True)
    party, files, before = Party(visit), len(os.listdir("/proc/self/fd")), threading.enumerate()
    wrong = list[str]()
    try:
        with party.watching():
            try:
                run_ranks(visit.ranks, party.member, timeout=PATIENCE)
            finally:
                party.wait()
        wrong = party.problems()
        limits.until(lambda: not own_threads(before), lambda: f"the end of {own_threads(before)}")
        if len(os.listdir("/proc/self/fd")) > files:
            wrong.append("file descriptors are left open")
    except Exception as error:
        notes = "; ".join(getattr(error, "__notes__", []))
        wrong = [f"{type(error).__name__}: {error} ({notes})", "".join(traceback.format_exception(error)[-3:])]
        wrong += party.errors
    finally:
        faulthandler.cancel_dump_traceback_later()
    return wrong, party.joined


def faults(seeds: Sequence[int], specs: Sequence[str] = SPECS) -> tuple[dict[int, list[str]], int]:
    """Runs trainings; returns what is wrong, by seed, and how many processes have joined."""
    found, total = {}, 0
    for seed in seeds:
        wrong, joined = problems_of(draw(seed, specs))
        total += joined
        if wrong:
            found[seed] = wrong
            print(f"--seed {seed}: {'; '.join(wrong)}\n  {draw(seed, specs)}", flush=True)
    return found, total


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs trainings and prints what is wrong; the exit status is 1 if anything is."""
    joined = 0

    def counted(seeds: Sequence[int], specs: Sequence[str]) -> dict[int, list[str]]:
        nonlocal joined
        wrong, more = faults(seeds, specs)
        joined += more
        return wrong

    return run(arguments, __doc__, counted, lambda: f"{joined} joined, ")


if __name__ == "__main__":
    sys.exit(main())
