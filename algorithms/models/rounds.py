"""The loop of algorithms whose exchanges belong to steps: a round of exchanges of all buckets for a step, or for some."""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bagua_kernels.algorithms.engine.runtime import Runtime, Task, covered
from bagua_kernels.algorithms.models.catch_up import CatchUp
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.loop import READS, Loop, Vectors
from bagua_kernels.algorithms.models.plan import Plan
from bagua_kernels.algorithms.models.round import Round, When
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.comm import Work
from bagua_kernels.errors import CollectiveTimeoutError, follow_up

_IN_FLIGHT = 2
_PATIENCE = 1.0  # seconds of waiting for a round after which others get a letter about it
_CURE = "where a rank leaves out a step, pass scaler= or call skip_step(); with fewer batches, train within join()"


@dataclass(frozen=True)
class RoundsOptions:
    """How rounds take place.

    Attributes:
        several: True if an exchange makes several collectives on one communicator, which must not meet those of others.
        announces: True if each round is announced to all other ranks when it begins, as within `join`.
        delay: the number of optimizer's steps that come before results are put in place before a forward pass.
        cure_of_lateness: what errors contain about a rank that did not come to a round.
        decay: returns the factor by which a period of the topology shrinks differences at worst; None without a topology.
        compares_writes: True if what is written into parameters has to be the same on all ranks.
        at_once: buckets that are under way at a time, None for all. A round takes the results of the first ones before it begins
            the others, which bounds their memory.
    """

    several: bool = False
    announces: bool = False
    delay: int = 0
    cure_of_lateness: str = _CURE
    decay: Callable[[], float] | None = None
    compares_writes: bool = False
    at_once: int | None = None


class Rounds(Loop):
    """Exchanges all buckets after a step, or beside it.

    All ranks take the same number of steps, at their own pace: a rank waits for the neighbours of its round, and for no one
    else. A rank that leaves out `optimizer.step()` calls `skip_step()` instead.

    Attributes:
        all: a round for each bucket.
        plan: which steps have a round.
        catch_up: where ranks come together that may have taken different numbers of steps.
        options: how rounds take place.
        begun: the number of rounds that have begun since the module was wrapped.
        known: the number of the last round that began, plus 1.
        finished: the number of the last round whose results are in place, plus 1.
        under_way: True from the beginning of exchanges until their results are in place.
        number: of the round that began last.
        tells: True if each round is announced to all other ranks when it begins.
        comparison: returns, for the number of a round, what compares all ranks before their exchanges; None if nothing does.
    """

    def __init__(
        self,
        local: LocalModel,
        rounds: Sequence[Round],
        plan: Plan,
        options: RoundsOptions = RoundsOptions(),
    ) -> None:
        """Begins before the first round.

        Args:
            local: this rank's model.
            rounds: one for each bucket.
            plan: which steps have a round.
            options: how rounds take place.
        """
        super().__init__(local)
        self.all, self.plan, self.options = list(rounds), plan, options
        self.begun = self.known = self.number = self.finished = 0
        self.under_way = self.tells = False
        self.comparison: Callable[[int], Callable[[], None] | None] | None = None
        self._runtime: Runtime | None = None
        self._tasks: list[tuple[Round, Task]] = []
        self._taken: list[Round] = []  # whose results are taken and not yet in place
        self._spans: list[tuple[float, float]] = []  # when exchanges of the round under way began and ended
        self._warned = False
        self._decay: float | None = None
        self._begun_at = -1  # the number of steps with which a round began before its step
        self._until = 0  # the number of steps with which what is under way is due
        self.catch_up = self.make_catch_up()

    def make_catch_up(self) -> CatchUp:
        """Returns where ranks come together."""
        return CatchUp(weakref.proxy(self), self.options.compares_writes)

    def begin(self) -> None:
        """See `Loop.begin`."""
        self._runtime = Runtime(self.local.communicator.device, _IN_FLIGHT, 1)
        self.catch_up.begin()

    @property
    def when(self) -> When:
        """When results are put in place."""
        return self.all[0].when if self.all else When.BEFORE_FORWARD

    def parts(self, number: int) -> list[Round]:
        """Returns the rounds of the buckets that are exchanged in a round."""
        return [each for each in self.all if each.takes_part(number)]

    def at_forward(self, training: bool) -> None:
        """See `Loop.at_forward`."""
        self.local.check_failure()
        if self._is_due():
            self.wait()
        elif self.when is When.BESIDE_STEP and training and not self._has_begun():
            self.begin_round()

    def at_step_begin(self) -> None:
        """See `Loop.at_step_begin`."""
        self.local.check_failure()
        if self.when is When.BESIDE_STEP and not self._has_begun():
            self.begin_round()
        if self.when is When.BESIDE_STEP or self._is_due():
            self.wait()

    def at_step_end(self) -> None:
        """See `Loop.at_step_end`."""
        if self.when is When.BEFORE_NEXT or self.plan.round_at(self.local.steps) is not None:
            self.wait()
        if self.when is not When.BESIDE_STEP:
            self.begin_round()
        self.local.steps += 1

    def _has_begun(self) -> bool:
        """Returns True if the round of the next step has begun, and may have been put in place by `wait` already."""
        return self.under_way or self._begun_at == self.local.steps

    def at_uncalled_step(self) -> None:
        """Warns once that a step's gradients are of parameters before the mean that was due at its forward pass."""
        if self.under_way and self._is_due() and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.local.title} puts means in place when the wrapped module is called, and it was not called since the "
                "last step, so that gradients are of the parameters before: call the module itself rather than its parts, or "
                "wait() after each step",
                RuntimeWarning,
                stacklevel=2,
            )

    def _is_due(self) -> bool:
        return self.when is When.BEFORE_FORWARD and self.local.steps >= self._until

    def skip_step(self) -> None:
        """Takes part in a round without an optimizer's step, for example because this rank leaves out a bad batch."""
        if self._is_due():
            self.wait()
        if self.local.is_through:
            self.at_step_begin()
            self.at_step_end()
        else:
            self.local.on_step_begin()
            self.local.on_step_end()

    def begin_round(self) -> None:
        """Starts the round that belongs to the present step, if there is one."""
        local, number = self.local, self.plan.round_at(self.local.steps)
        if number is None:
            return
        assert self._runtime is not None
        local.flat.check()
        local.check_frozen()
        self.catch_up.check_written()
        self.plan.begins()
        self.number, self._until, self.under_way = number, local.steps + 1 + self.options.delay, True
        self._begun_at, self.known = local.steps, number + 1
        self.begun += 1
        compare = None if self.comparison is None else self.comparison(number)
        if self.tells or ((self.options.announces or compare is not None) and not local.is_through):
            self.catch_up.tell()
        if compare is not None:
            with local.failing():
                compare()
        most = self.options.at_once
        with local.failing(), torch.no_grad():
            for part in self.parts(number):
                if most is not None and len(self._tasks) >= most:
                    self._take_result(*self._tasks.pop(0))
                steps = part.run(number)
                run = partial(_rest, next(steps, None), steps)
                label = f"bagua_kernels {local.name}, bucket {part.bucket.index}"
                self._tasks.append((part, self._runtime.start(part.bucket.index, run, label, self.options.several)))
        self.plan.begun(local.wait_seconds)

    def _take_result(self, part: Round, task: Task) -> None:
        """Waits for the exchange of a bucket, and takes its result, which `wait` puts in place."""
        self._wait_for(task)
        try:
            task.check()
        except CollectiveTimeoutError as error:
            raise follow_up(error, f"{error}; {self.options.cure_of_lateness}") from error
        self._spans.append((task.began, task.ended))
        part.take_result(self.number)
        self._taken.append(part)

    def _put_in_place(self) -> None:
        taken, self._taken = self._taken, []
        for part in taken:
            part.merge(self.number)

    def wait(self) -> None:
        """See `Loop.wait`."""
        if not self.under_way:
            return
        local, number = self.local, self.number
        local.check_failure()
        self.catch_up.wait_for_round()
        # What was written meanwhile is not to be lost.
        written = not local.at_point and local.has_to_keep()
        values = local.flat.copies() if written else []
        tasks, self._tasks = self._tasks, []
        self.under_way = False
        with local.failing(), torch.no_grad():
            local.flat.check()
            self._put_in_place()
            for part, task in tasks:
                self._take_result(part, task)
                # The buckets that follow are on their way meanwhile.
                self._put_in_place()
            for part in self.all:
                part.merged(number)
            if written:
                local.put(values)
        if not written:
            local.mark()
        local.exchange_seconds += covered(self._spans)
        self._spans = []
        self.finished = number + 1
        with torch.no_grad():
            for part in self.all:
                part.placed(number)

    def await_exchanges(self) -> None:
        """Waits for the exchanges under way, and leaves it to `wait` to put their results in place."""
        self.local.check_failure()
        with self.local.failing():
            for _, task in self._tasks:
                self._wait_for(task)
                if task.error is not None:
                    raise task.error

    def _wait_for(self, task: Task) -> None:
        """Waits for an exchange, which the mailbox's timeout bounds."""
        begin = time.perf_counter()
        if not task.done.wait(_PATIENCE):
            # A rank that is at a call already, with fewer steps, hears of the round in no other way.
            if not self.local.is_through:
                self.catch_up.tell()
            task.done.wait()
        self.local.wait_seconds += time.perf_counter() - begin

    @property
    def unfinished(self) -> int | None:
        """The number of the step whose round has begun and was not put in place; None if there is none."""
        return self._begun_at if self.known > self.finished else None

    def arrive(self, call: str) -> None:
        """See `Loop.arrive`; takes part in the rounds of ranks that have taken more steps."""
        self.catch_up.arrive(call)
        reads = call in READS or (self.when is When.BESIDE_STEP and call == "algorithm_state_dict()")
        if self.local.in_step and reads:
            # What only reads changes no parameters between a forward and its backward pass.
            self.await_exchanges()
        else:
            self.wait()
        # The callers read and write buckets.
        self.local.flat.check()
        self.catch_up.arrived(call)
        for each in self.all:
            each.arrived(call)

    def join(self) -> AbstractContextManager[None]:
        """See `RoundAlgorithm.join`."""
        return self.catch_up.join()

    def before_arrival(self, call: str) -> None:
        """Called before this rank waits for others at a call: does what they expect of it before they can come there."""

    def end_join(self) -> None:
        """Takes part in the rounds of ranks that have more batches, without steps of its own."""
        # A round that began and has no step yet belongs to the step that is left out here.
        if self.when is When.BESIDE_STEP and self.under_way:
            self.skip_step()
        self.catch_up.arrive("the end of join()", equal_steps=True)
        self.wait()

    def finish(self) -> None:
        """See `Loop.finish`; takes part in the rounds of ranks that have taken more steps."""
        self.catch_up.finish()
        self.wait()

    def restart(self) -> None:
        """See `Loop.restart`."""
        for each in self.all:
            each.restart()

    def take_written(self, values: list[torch.Tensor]) -> None:
        """See `Loop.take_written`."""
        super().take_written(values)
        for each in self.all:
            each.follow()
        self.catch_up.tell_written()

    def mean_of_ranks(self, vector: torch.Tensor) -> None:
        """See `Loop.mean_of_ranks`."""
        if not self.catch_up.mean_of_ranks(vector):
            super().mean_of_ranks(vector)

    def give_first(self, data: torch.Tensor) -> None:
        """See `Loop.give_first`."""
        if not self.catch_up.give_first(data):
            super().give_first(data)

    def take_steps(self, steps: int) -> None:
        """See `Loop.take_steps`."""
        self._begun_at = -1
        self.take_rounds(self.plan.before(steps))
        self.plan.restart(steps)

    def take_rounds(self, rounds: int) -> None:
        """Goes on with a number of rounds, whose results are in place."""
        self.known = self.finished = rounds

    def stats(self, stats: Stats) -> Stats:
        """See `Loop.stats`."""
        if any(each.changes_beside for each in self.all):
            self.await_exchanges()
        squares = [found for found in (each.disagreement() for each in self.all) if found is not None]
        total, terms = sum(square for square, _ in squares), sum(number for _, number in squares)
        decay = None
        if self.options.decay is not None:
            decay = self._decay = self.options.decay() if self._decay is None else self._decay
        return replace(stats, rounds=self.begun, disagreement=float((total / max(1, terms)) ** 0.5), decay=decay)

    def residual_norm(self) -> float:
        """See `Loop.residual_norm`."""
        return math.hypot(*(each.residual_norm() for each in self.all))

    def vectors(self, *, copies: bool = True) -> Vectors:
        """See `Loop.vectors`; with the states of the rounds."""
        found = super().vectors(copies=copies)
        for each in self.all:
            for key, named in each.state().items():
                found.setdefault(key, {}).update(named)
        return found

    def numbers(self) -> dict[str, Any]:
        """See `Loop.numbers`."""
        found = self.plan.numbers()
        for each in self.all:
            _merge(found, each.numbers())
        return found

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """See `Loop.load_numbers`."""
        self.plan.load_numbers(numbers)
        for each in self.all:
            each.load_numbers(numbers)

    def load_vectors(self, states: Sequence[Mapping[str, Any]]) -> None:
        """See `Loop.load_vectors`."""
        super().load_vectors(states)
        if len(states) == 1:
            for each in self.all:
                each.load(states[0]["vectors"])

    def mean_sources(self) -> Iterator[torch.Tensor]:
        """See `Loop.mean_sources`."""
        return (each.mean_source() for each in self.all)

    def stop(self) -> None:
        """See `Loop.stop`."""
        if self._runtime is not None:
            self._runtime.close()
        self.catch_up.close()


def _rest(first: Work | None, steps: Iterator[Work]) -> Iterator[Work]:
    if first is not None:
        yield first
    with torch.no_grad():
        yield from steps


def _merge(found: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Adds numbers of another bucket; those of the same name are the same, or have further names within."""
    for name, value in more.items():
        if isinstance(value, Mapping) and name in found:
            _merge(found[name], value)
        else:
            found[name] = value
