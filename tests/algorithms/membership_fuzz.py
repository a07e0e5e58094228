"""Random trainings that lose ranks at random moments, by all algorithms that heal.

    python -m tests.algorithms.membership_fuzz --schedules 1000 --seed 0

Each training is drawn from its seed: the algorithm, the ranks, which of them end, and which lose what others complete.
`--seed SEED --schedules 1` repeats one. Ranks are threads, whose order is the system's, so that a fault may need some tries.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import itertools
import json
import logging
import os
import random
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from bagua_kernels import checkpoint
from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.comm import LocalCommunicator, Membership, run_ranks
from bagua_kernels.comm.backends.local.mailbox import LocalMailbox, LocalMailboxWork
from bagua_kernels.comm.backends.local.world import LocalWork
from bagua_kernels.errors import RankLostError
from tests import limits
from tests.algorithms.test_healing import ALIKE, APART, Net, batch, parts_of, step_of, vector, wrapped

# Whose residuals are those of ranks alone: residuals and what was sent are the gradients.
CONSERVING = ("topk:ratio=0.1,min_numel=0",)
SPECS = (*ALIKE, *APART)
# Seconds for which a rank waits for another: longer than kernels take to compile. Nothing that heals waits for so long.
PATIENCE = 60.0
# What all ranks call between two steps of some trainings.
CALLS = ("averaged", "consensus", "save", "synchronize")
# Between float32 and float64.
TOLERANCE = 1e-4


class EndedError(Exception):
    """The end of a rank, in the middle of whatever it does."""


@dataclass
class Moment:
    """When something happens to a rank: at one of its next operations, exchanges, or letters.

    Attributes:
        step: from which on these are counted.
        after: how many come before.
        heals: True to count from the rank's first change of members on, instead of a step.
        armed: True while they are counted.
        has_come: True once it has happened.
    """

    step: int
    after: int
    heals: bool = False
    armed: bool = False
    has_come: bool = False

    def comes(self) -> bool:
        """Counts one; returns True if it is the one."""
        if not self.armed or self.has_come:
            return False
        self.after -= 1
        self.has_come = self.after < 0
        return self.has_come


@dataclass
class Training:
    """What is drawn from a seed.

    Attributes:
        spec: of the algorithm.
        ranks: their number.
        steps: of each rank.
        ends: when ranks end.
        trips: when ranks lose what others complete.
        calls: what all ranks call before a step.
        second: of the algorithm of another model, which is trained in turn with the first; empty for none.
        is_joint: True if both have one loss, and so one backward pass.
    """

    spec: str
    ranks: int
    steps: int
    ends: dict[int, Moment] = field(default_factory=dict)
    trips: dict[int, Moment] = field(default_factory=dict)
    calls: dict[int, str] = field(default_factory=dict)
    second: str = ""
    is_joint: bool = False


def draw(seed: int, specs: Sequence[str] = SPECS) -> Training:
    """Returns the training of a seed."""
    dice = random.Random(seed)
    made = Training(dice.choice(specs), dice.randint(3, 8), dice.randint(5, 9))
    # A quorum takes a message that is lost for the loss of its rank.
    tripping = dice.random() < 0.4 and "quorum" not in made.spec
    count = dice.randint(0, 1) if tripping else dice.randint(1, min(3, made.ranks - 1))
    victims = dice.sample(range(made.ranks), count)
    if victims and 0 not in victims and dice.random() < 0.4:
        victims[0] = 0  # leads
    together = dice.randrange(made.steps)
    for place, rank in enumerate(victims):
        kind = dice.choice(("silent", "within", "within", *(("together", "heals") if place else ())))
        step = together if kind == "together" else dice.randrange(made.steps)
        after = 0 if kind == "silent" else dice.randint(1, 30)
        made.ends[rank] = Moment(step, after, heals=kind == "heals")
    if tripping:
        rank = dice.choice([rank for rank in range(made.ranks) if rank not in made.ends])
        made.trips[rank] = Moment(dice.randrange(made.steps), dice.randint(0, 12))
    # Of means that are compared a call would be another step.
    if made.spec not in (*CONSERVING, "allreduce") and dice.random() < 0.5:
        # Where something happens anyway.
        steps = {each.step for each in (*made.ends.values(), *made.trips.values())}
        made.calls = {step: dice.choice(CALLS) for step in steps}
    alike = [each for each in specs if each in ALIKE]
    # Two models go on together with algorithms on gradients alone.
    if made.spec in alike and dice.random() < 0.4:
        made.second, made.is_joint = dice.choice(alike), dice.random() < 0.6
    if victims and dice.random() < 0.2:
        made.ends[victims[0]] = Moment(-1, dice.randint(0, 12))  # within constructors
    return made


@dataclass
class Course:
    """A training that is under way.

    Attributes:
        training: what was drawn.
        late: operations that ended since their time was over.
        seen: of each rank, for each step the members afterwards.
        sums: of each rank, for each step its gradient, its residual afterwards, and the mean.
        found: of each rank, for each step with a call what that has found.
    """

    training: Training
    late: list[str] = field(default_factory=list)
    seen: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    sums: dict[int, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    found: dict[int, dict[int, Any]] = field(default_factory=dict)
    folder: str = ""

    def act(self, world: Any, rank: int) -> None:
        """Ends a rank, at one of its acts; nothing that it does afterwards has an effect."""
        end = self.training.ends.get(rank)
        if end is not None and (end.has_come or end.comes()):
            world.lose(rank, "it has ended")
            raise EndedError(f"rank {rank}")

    def finish(self, rank: int) -> None:
        """Lets a rank lose what it has just received."""
        trip = self.training.trips.get(rank)
        if trip is not None and trip.comes():
            raise RankLostError("a connection broke", [0])

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """In the block its moments come."""
        with contextlib.ExitStack() as stack:

            def replace(kind: type, name: str, made: Any) -> None:
                stack.enter_context(mock.patch.object(kind, name, made(getattr(kind, name))))

            def of_operation(call: Any) -> Any:
                def start(communicator: Any, *arguments: Any, **options: Any) -> Any:
                    self.act(communicator._world, communicator._group.ranks[communicator.rank])
                    return call(communicator, *arguments, **options)

                return start

            def of_mailbox(call: Any) -> Any:
                def start(mailbox: Any, *arguments: Any, **options: Any) -> Any:
                    self.act(mailbox._world, mailbox._office.ranks[mailbox.rank])
                    return call(mailbox, *arguments, **options)

                return start

            def of_work(call: Any) -> Any:
                def conclude(work: Any) -> None:
                    call(work)
                    self.finish(work.group.ranks[work.rank])

                return conclude

            def of_exchange(call: Any) -> Any:
                def conclude(work: Any) -> None:
                    call(work)
                    self.finish(work._mailbox._office.ranks[work._mailbox.rank])

                return conclude

            def of_lateness(call: Any) -> Any:
                def late(work: Any, missing: list[int]) -> Any:
                    self.late.append(f"{work.name} at rank {work.group.ranks[work.rank]}")
                    return call(work, missing)

                return late

            replace(LocalCommunicator, "_start", of_operation)
            replace(LocalMailbox, "_exchange", of_mailbox)
            replace(LocalMailbox, "_post", of_mailbox)
            replace(LocalWork, "_conclude", of_work)
            replace(LocalMailboxWork, "_conclude", of_exchange)
            replace(LocalWork, "_late", of_lateness)
            yield

    def train(self, communicator: LocalCommunicator) -> dict[str, Any] | None:
        """One rank's training; returns what it has come to, None if it has ended before."""
        name, training = communicator.rank, self.training
        none = Moment(0, 0)
        end, trip = training.ends.get(name, none), training.trips.get(name, none)
        members = Membership(communicator)
        change = members.change

        def changed(error: BaseException) -> None:
            end.armed |= end.heals
            change(error)

        members.change = changed  # type: ignore[method-assign]
        net, optimizer = parts_of(training.spec)
        other: _Trained | None = None
        opened = list[Algorithm]()
        try:
            end.armed |= end.step < 0
            algorithm = wrapped(training.spec, members, net, optimizer)
            opened.append(algorithm)
            optimizer = algorithm.optimizer or optimizer
            if training.second:
                other = _Trained(training.second, members)
                opened.append(other.algorithm)
            for step in range(training.steps):
                trip.armed |= name in training.trips and trip.step == step
                end.armed |= name in training.ends and not end.heals and end.step == step
                if end.armed and end.after == 0 and end.step == step:
                    self.act(communicator._world, name)
                if step in training.calls:
                    self.found.setdefault(name, {})[step] = self._call(training.calls[step], algorithm, optimizer, net)
                if other is not None and training.is_joint and training.spec not in CONSERVING:
                    _joint_step([(algorithm, optimizer), (other.algorithm, other.optimizer)], name, step)
                else:
                    self._step(algorithm, optimizer, net, name, step)
                    if other is not None:
                        step_of(other.algorithm, other.optimizer, name, step)
                self.seen.setdefault(name, []).append(members.ranks)
            own = vector(net)
            algorithm.synchronize()
            second = None if other is None else other.end()
            end.armed = end.heals = trip.armed = False
            if end.has_come:
                raise EndedError(f"rank {name}")
            steps = algorithm.stats().steps
            algorithm.close()
            if other is not None:
                other.algorithm.close()
            found = {"own": own, "mean": vector(net), "ranks": members.ranks, "epoch": members.epoch, "steps": steps}
            found["second"] = second
            members.prepare_close()
            members.communicator.barrier().wait()
            members.close()
            return found
        except BaseException:
            if not end.has_come:
                raise
            return None
        finally:
            if end.has_come:
                end_of_process(members, *opened)

    def _call(self, call: str, algorithm: Algorithm, optimizer: Any, net: Net) -> Any:
        """Makes a call; returns what is to be the same on all ranks."""
        if call == "consensus":
            return algorithm.consensus()
        if call == "save":
            checkpoint.save(self.folder, algorithm, optimizer, rng=False)
            listed = json.loads((Path(self.folder) / "checkpoint.json").read_text())
            assert listed["ranks"] >= sum(rank not in self.training.ends for rank in range(self.training.ranks))
            return None
        if call == "synchronize":
            before = algorithm.stats().epochs
            algorithm.synchronize()
            # Others may have taken a step since, from whose mean all begin anew.
            is_other = getattr(algorithm, "heals_by_mean", False) and algorithm.stats().epochs != before
            return None if is_other else vector(net)
        own = vector(net)
        with algorithm.averaged():
            mean = vector(net)
        # In other families what was under way may have been put in place.
        assert self.training.spec not in (*ALIKE, "decentralized") or torch.equal(vector(net), own)
        return mean

    def _step(self, algorithm: Algorithm, optimizer: Any, net: Net, name: int, step: int) -> None:
        if self.training.spec not in CONSERVING:
            step_of(algorithm, optimizer, name, step)
            return
        own: dict[str, torch.Tensor] = {}
        hooks = [p.register_hook(lambda g, key=key: own.update({key: g.clone()})) for key, p in net.named_parameters()]
        step_of(algorithm, optimizer, name, step)
        for hook in hooks:
            hook.remove()
        named = dict(net.named_parameters())
        residuals = algorithm.algorithm_state_dict()["vectors"].get("worker", {})
        parts = [
            [own[key].reshape(-1) for key in named],
            [residuals[key].reshape(-1) if key in residuals else torch.zeros(p.numel()) for key, p in named.items()],
            [p.grad.reshape(-1) for p in named.values()],
        ]
        gradient, residual, mean = (torch.cat(each).double() for each in parts)
        self.sums.setdefault(name, []).append((gradient, residual, mean))

    def problems(self, found: Sequence[dict[str, Any] | None]) -> list[str]:
        """Returns what is wrong with what the ranks have come to."""
        training = self.training
        left = [rank for rank in range(training.ranks) if not (rank in training.ends and training.ends[rank].has_come)]
        wrong = [f"waited until the time was over: {each}" for each in self.late[:3]]
        results = [each for rank in left if (each := found[rank]) is not None]
        if len(results) < len(left):
            return [*wrong, f"of ranks {left} only {len(results)} have come to the end"]
        first = results[0]
        for rank, each in zip(left, results, strict=True):
            if not {*left} <= {*each["ranks"]}:
                wrong.append(f"rank {rank} has members {each['ranks']}, and ranks {left} live")
            if (each["epoch"], each["ranks"]) != (first["epoch"], first["ranks"]):
                wrong.append(f"rank {rank} is in epoch {each['epoch']}, not {first['epoch']}")
            if not torch.equal(each["mean"], first["mean"]) or not each["mean"].isfinite().all():
                wrong.append(f"rank {rank} has another mean")
            if not _is_same(each["second"], first["second"]):
                wrong.append(f"rank {rank} has another second model")
            if training.spec not in APART and each["steps"] != training.steps:
                wrong.append(f"rank {rank} has counted {each['steps']} of {training.steps} steps")
            if training.spec not in APART and not torch.equal(each["own"], first["own"]):
                wrong.append(f"rank {rank} has other parameters")
        for step in training.calls:
            values = [one[step] for rank in left if step in (one := self.found.get(rank, {}))]
            known = [one for one in values if one is not None]
            if len(values) < len(left) or not all(_is_same(one, known[0]) for one in known):
                wrong.append(f"{training.calls[step]} before step {step} has found other values on some ranks")
        if not wrong and training.spec == "allreduce":
            wrong += self._unlike_arithmetic(left, first["own"])
        return wrong + self._not_conserved()

    def _unlike_arithmetic(self, left: Sequence[int], own: torch.Tensor) -> list[str]:
        """Compares with means in float64 over the ranks that were members when each step was completed."""
        training, seen = self.training, self.seen[left[0]]
        gone = [rank for rank in range(training.ranks) if rank not in left]
        # A rank that is gone after a step may have taken part in it: it ended behind its exchange, or within.
        first_without = [
            next((step for step, ranks in enumerate(seen) if rank not in ranks), len(seen)) for rank in gone
        ]
        for extra in itertools.product((0, 1), repeat=len(gone)):
            until = {rank: step + more for rank, step, more in zip(gone, first_without, extra, strict=True)}
            net = Net().double()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
            for step in range(training.steps):
                ranks = [rank for rank in range(training.ranks) if step < until.get(rank, training.steps)]
                optimizer.zero_grad()
                for rank in ranks:
                    x, y = batch(rank, step)
                    (F.cross_entropy(net(x.double()), y) / len(ranks)).backward()
                optimizer.step()
            if torch.allclose(own.double(), vector(net), rtol=TOLERANCE, atol=TOLERANCE):
                return []
        return ["the parameters are those of no means over the members of each step"]

    def _not_conserved(self) -> list[str]:
        """Compares residuals and what was sent with gradients, in steps whose ranks are known for sure."""
        wrong, training = [], self.training
        for step in range(training.steps):
            some = [rank for rank, ranks in self.seen.items() if len(ranks) > step]
            members = self.seen[some[0]][step] if some else ()
            before = self.seen[some[0]][step - 1] if some and step else tuple(range(training.ranks))
            known = [rank for rank in members if len(self.sums.get(rank, ())) > step]
            if not members or len(known) < len(members) or members != before:
                continue
            sums = [self.sums[rank] for rank in members]
            earlier = [each[step - 1][1] if step else torch.zeros(()) for each in sums]
            sent = sum(each[step][0] + e - each[step][1] for each, e in zip(sums, earlier, strict=True))
            if not torch.allclose(sent / len(members), sums[0][step][2], rtol=TOLERANCE, atol=TOLERANCE):  # type: ignore[operator]
                wrong.append(f"step {step}: residuals and means are not the gradients of ranks {members}")
        return wrong


def _is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def _joint_step(models: Sequence[tuple[Algorithm, torch.optim.Optimizer]], name: int, step: int) -> None:
    """A step of models with one loss."""
    x, y = batch(name, step)
    for _, optimizer in models:
        optimizer.zero_grad()
    torch.stack([F.cross_entropy(model(x), y) for model, _ in models]).sum().backward()
    for _, optimizer in models:
        optimizer.step()


class _Trained:
    """A second model in training."""

    def __init__(self, spec: str, members: Membership) -> None:
        self.spec = spec
        self.net, optimizer = parts_of(spec)
        self.algorithm = wrapped(spec, members, self.net, optimizer)
        self.optimizer = self.algorithm.optimizer or optimizer

    def end(self) -> torch.Tensor:
        """Returns what is to be the same on all ranks."""
        own = vector(self.net)
        self.algorithm.synchronize()
        return vector(self.net) if self.spec in APART else own


def end_of_process(members: Membership, *algorithms: Algorithm) -> None:
    """Does what the end of a process does: its threads end, and its connections."""
    with contextlib.suppress(Exception):
        members._end("its process has ended")
    for each in algorithms:
        with contextlib.suppress(Exception):
            each.__exit__(EndedError, EndedError(), None)


def own_threads(before: Collection[threading.Thread]) -> list[str]:
    """The threads of ranks and of what they have opened, without those that other tests have left."""
    new = [each.name for each in threading.enumerate() if each not in before]
    return [name for name in new if name.startswith(("bagua_kernels", "rank "))]


def problems_of(training: Training) -> list[str]:
    """Returns what is wrong with a training, an exception among it."""
    faulthandler.dump_traceback_later(limits.seconds(4 * PATIENCE), exit=True)
    course, files, before = Course(training), len(os.listdir("/proc/self/fd")), threading.enumerate()
    try:
        with course.watching(), tempfile.TemporaryDirectory() as course.folder:
            found = run_ranks(training.ranks, course.train, timeout=PATIENCE)
        wrong = course.problems(found)
        limits.until(lambda: not own_threads(before), lambda: f"the end of {own_threads(before)}")
        if len(os.listdir("/proc/self/fd")) > files:
            wrong.append("file descriptors are left open")
        return wrong
    except Exception as error:
        notes = "; ".join(getattr(error, "__notes__", []))
        return [f"{type(error).__name__}: {error} ({notes})", "".join(traceback.format_exception(error)[-3:])]
    finally:
        faulthandler.cancel_dump_traceback_later()


def faults(seeds: Sequence[int], specs: Sequence[str] = SPECS) -> dict[int, list[str]]:
    """Runs trainings; returns what is wrong, by seed."""
    found = {}
    for seed in seeds:
        if wrong := problems_of(draw(seed, specs)):
            found[seed] = wrong
            print(f"--seed {seed}: {'; '.join(wrong)}\n  {draw(seed, specs)}", flush=True)
    return found


def run(
    arguments: Sequence[str] | None,
    description: str | None,
    of_seeds: Callable[[Sequence[int], Sequence[str]], dict[int, list[str]]],
    note: Callable[[], str] = str,
) -> int:
    """Runs random trainings by the arguments of a command; returns its exit status, 1 if anything is wrong.

    Args:
        arguments: of the command line.
        description: of the command.
        of_seeds: runs trainings of some algorithms; returns what is wrong, by seed.
        note: returns what else is printed of those so far.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=1000, help="trainings")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--specs", nargs="+", default=SPECS, help="the algorithms to draw from")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("bagua_kernels").setLevel(logging.ERROR)
    begin, total = time.monotonic(), 0
    for part in range(0, options.schedules, 50):
        end = min(part + 50, options.schedules)
        total += len(of_seeds(range(options.seed + part, options.seed + end), options.specs))
        gc.collect()
        print(f"{end} of {options.schedules}, {note()}{time.monotonic() - begin:.0f} s", flush=True)
    print(f"{options.schedules} trainings, {note()}{total} with faults")
    return int(total > 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs trainings and prints what is wrong; the exit status is 1 if anything is."""
    return run(arguments, __doc__, faults)


if __name__ == "__main__":
    sys.exit(main())
