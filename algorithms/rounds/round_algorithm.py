"""Algorithms whose exchanges belong to steps: one round of exchanges of all buckets for a step, or for some."""

from __future__ import annotations

import abc
import contextlib
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal, Unpack

import torch

from bagua_kernels.algorithms.engine.member import EngineCounters
from bagua_kernels.algorithms.engine.runtime import Runtime, Task, covered
from bagua_kernels.algorithms.model_algorithm import READS, ModelAlgorithm, ModelOptions
from bagua_kernels.algorithms.rounds.letters import Letters, Written
from bagua_kernels.algorithms.rounds.mixing import Mixer
from bagua_kernels.algorithms.rounds.writes import checksums, first_difference
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Mailbox, Work
from bagua_kernels.errors import CollectiveTimeoutError, MismatchError, follow_up

_IN_FLIGHT = 2
_ANY_STEPS = 1 << 63
_PATIENCE = 1.0  # seconds of waiting for a round after which others are told of it


class RoundOptions(ModelOptions, total=False):
    """Keyword arguments of `RoundAlgorithm`."""

    interval: int


class RoundAlgorithm(ModelAlgorithm):
    """Base of the algorithms that exchange all buckets after a step, or beside it.

    All ranks take the same number of steps, at their own pace: a rank waits for the neighbours of its round, and for no one
    else. A rank that leaves out `optimizer.step()` calls `skip_step()` instead.

    A subclass has `exchange` and `merge`.

    Attributes:
        due: when results are put in place. With "forward", exchanges begin after the optimizer's step and end before the next
            forward pass. With "step", they begin before the forward pass and end before the optimizer's step. With "round",
            they begin after the optimizer's step and end before the next round, beside all that lies between.
        interval: the number of steps for which there is one round.
        delay: with "forward", the number of optimizer's steps that come before results are put in place.
        cure_of_lateness: what errors contain about a rank that did not come to a round.
        several: True if an exchange makes several collectives on one communicator, which must not meet those of others.
        rounds_begun: the number of rounds that have begun since the module was wrapped.
        is_through: True while this rank takes part in others' rounds without steps of its own, at a call to which all come.
    """

    due: ClassVar[Literal["forward", "step", "round"]] = "forward"
    cure_of_lateness = (
        "where a rank leaves out a step, pass scaler= or call skip_step(); with fewer batches, train within join()"
    )
    several = False
    delay = 0

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        interval: int = 1,
        **options: Unpack[ModelOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `ModelAlgorithm`.
            optimizer: as for `ModelAlgorithm`.
            interval: the number of steps for which there is one round of exchanges.
            **options: as for `ModelAlgorithm`.

        Raises:
            TypeError: as for `ModelAlgorithm`.
            ValueError: `interval` is below 1, or as for `ModelAlgorithm`.
        """
        if interval < 1:
            raise ValueError(f"interval must be at least 1, got {interval=}")
        self.interval = interval
        self._runtime: Runtime | None = None
        self._tasks: list[tuple[Bucket, Task]] = []
        self._under_way = False
        self._turn = 0
        self._warned = False
        self._begun_at = -1  # the number of steps with which a round began before its step
        self.rounds_begun = 0
        self._rounds_known = 0  # the number of the last round that began, plus 1
        self._letters: Letters | None = None
        self._until = 0  # the number of steps with which what is under way is due
        self._joining = False
        self.is_through = False
        self._wait_seconds = self._exchange_seconds = 0.0
        self.mixer: Mixer | None = None
        super().__init__(module, optimizer, **options)

    @abc.abstractmethod
    def exchange(self, bucket: Bucket, turn: int) -> Iterator[Work]:
        """Exchanges one bucket; yields each communication that it waits for.

        What comes before the first `yield` runs on the training thread, and reads parameters. The rest runs beside training: it
        neither reads nor writes parameters.

        Args:
            bucket: to exchange.
            turn: number of the round, from 0, equal on all ranks.
        """

    def merge(self, bucket: Bucket, turn: int) -> None:
        """Puts the results of a bucket's exchange in place, on the training thread.

        Args:
            bucket: whose exchange has ended, as have those of the buckets before it.
            turn: number of the round.
        """

    def turn_at(self, step: int) -> int | None:
        """Returns the number of the round that belongs to a step; None if there is none.

        Args:
            step: number of the optimizer's step, from 0.
        """
        rounds, rest = divmod(step + 1, self.interval)
        return None if rest else rounds - 1

    def buckets_of(self, turn: int) -> Sequence[Bucket]:
        """Returns the buckets that are exchanged in a round, equal on all ranks."""
        return self.flat.buckets

    def number(self, bucket: Bucket, turn: int) -> int:
        """Returns the number of the exchange of a bucket in a round, for `Mailbox.exchange` or `Mixer.exchange`."""
        return turn * len(self.flat.buckets) + bucket.index

    def open(self, mailbox: Mailbox) -> None:
        """See `ModelAlgorithm.open`."""
        self._runtime = Runtime(self._communicator.device, _IN_FLIGHT, 1)
        self._letters = Letters(mailbox) if mailbox.size > 1 else None

    def stats(self) -> Stats:
        """See `Algorithm.stats`."""
        return replace(super().stats(), rounds=self.rounds_begun)

    def disagreement(self) -> float:
        """See `ModelAlgorithm.disagreement`."""
        return 0.0 if self.mixer is None else self.mixer.disagreement()

    @property
    def decay(self) -> float | None:
        """See `ModelAlgorithm.decay`."""
        return None if self.mixer is None else self.mixer.decay

    def at_forward(self, training: bool) -> None:
        """See `ModelAlgorithm.at_forward`."""
        self._check_failure()
        if self._is_due():
            self.wait()
        elif self.due == "step" and training and not self._has_begun():
            self._begin()

    def at_step_begin(self) -> None:
        """See `ModelAlgorithm.at_step_begin`."""
        self._check_failure()
        if self.due == "step" and not self._has_begun():
            self._begin()
        if self.due == "step" or self._is_due():
            self.wait()

    def at_step_end(self) -> None:
        """See `ModelAlgorithm.at_step_end`."""
        if self.due == "round" or self.turn_at(self._steps) is not None:
            self.wait()
        if self.due != "step":
            self._begin()
        self._steps += 1

    def _has_begun(self) -> bool:
        """Returns True if the round of the next step has begun, and may have been put in place by `wait` already."""
        return self._under_way or self._begun_at == self._steps

    def at_uncalled_step(self) -> None:
        """Warns once that a step's gradients are of parameters before the mean that was due at its forward pass."""
        if self._under_way and self._is_due() and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self).__name__} puts means in place when the wrapped module is called, and it was not called since the "
                "last step, so that gradients are of the parameters before: call the module itself rather than its parts, or "
                "wait() after each step",
                RuntimeWarning,
                stacklevel=2,
            )

    def _is_due(self) -> bool:
        return self.due == "forward" and self._steps >= self._until

    def skip_step(self) -> None:
        """Takes part in a round without an optimizer's step, for example because this rank leaves out a bad batch."""
        if self._is_due():
            self.wait()
        if self.is_through:
            self.at_step_begin()
            self.at_step_end()
        else:
            self.on_step_begin()
            self.on_step_end()

    def _begin(self) -> None:
        """Starts the round that belongs to the present step, if there is one."""
        turn = self.turn_at(self._steps)
        if self._runtime is None or turn is None:
            return
        self.flat.check()
        self._check_untrained()
        self._check_written()
        self._turn, self._until, self._under_way = turn, self._steps + 1 + self.delay, True
        self._begun_at = self._steps
        self._rounds_known = turn + 1
        self.rounds_begun += 1
        if self._joining:
            self._tell()
        with self._failing(), torch.no_grad():
            for bucket in self.buckets_of(turn):
                steps = self.exchange(bucket, self._turn)
                run = partial(_rest, next(steps, None), steps)
                label = f"bagua_kernels {self.name}, bucket {bucket.index}"
                self._tasks.append((bucket, self._runtime.start(bucket.index, run, label, self.several)))

    def wait(self) -> None:
        """See `ModelAlgorithm.wait`."""
        if not self._under_way:
            return
        self._check_failure()
        # What was written meanwhile is not to be lost.
        written = not self._at_point and self.has_to_keep()
        values = self.flat.copies() if written else []
        tasks, self._tasks = self._tasks, []
        self._under_way = False
        with self._failing(), torch.no_grad():
            self.flat.check()
            for bucket, task in tasks:
                self._wait_for(task)
                try:
                    task.check()
                except CollectiveTimeoutError as error:
                    raise follow_up(error, f"{error}; {self.cure_of_lateness}") from error
                # The buckets that follow are on their way meanwhile.
                self.merge(bucket, self._turn)
            if written:
                self._put(values)
        if not written:
            self.mark()
        self._exchange_seconds += covered([(task.began, task.ended) for _, task in tasks])

    def _end_exchanges(self, call: str) -> None:
        """See `ModelAlgorithm._end_exchanges`; what only reads changes no parameters between a forward and its backward pass."""
        reads = call in READS or (self.due == "step" and call == "algorithm_state_dict()")
        if self._in_step and reads:
            self.await_exchanges()
        else:
            self.wait()

    def await_exchanges(self) -> None:
        """Waits for the exchanges under way, and leaves it to `wait` to put their results in place."""
        self._check_failure()
        with self._failing():
            for _, task in self._tasks:
                self._wait_for(task)
                if task.error is not None:
                    raise task.error

    def _wait_for(self, task: Task) -> None:
        """Waits for an exchange, which the mailbox's timeout bounds."""
        begin = time.perf_counter()
        if not task.done.wait(_PATIENCE):
            # A rank that is at a call already, with fewer steps, hears of the round in no other way.
            if not self.is_through:
                self._tell()
            task.done.wait()
        self._wait_seconds += time.perf_counter() - begin

    def _tell(self) -> None:
        """Announces the round under way to all other ranks."""
        if self._letters is not None and self.follows_letters:
            self._letters.tell(self._steps + 1, self._rounds_known)

    def tell_written(self) -> None:
        """Announces to all other ranks parameters that were written here, and that are to be equal on all ranks."""
        if self._letters is not None and self.follows_letters:
            self._letters.tell_written(Written(self._rounds_known, tuple(checksums(self.flat))))

    def _check_written(self, read: bool = True) -> None:
        """Raises if parameters that are to be equal were written to other values on another rank, or there alone."""
        if self._letters is None or not self.follows_letters or not self.compares_writes:
            return
        found = self._letters.unequal(self._rounds_known, read)
        if found is None:
            return
        own = checksums(self.flat) if found.own is None else found.own.checksums
        name = first_difference(self.flat, own, found.other.checksums)
        here = "not on" if found.own is None else "to other values on"
        if found.own is not None and found.own.rounds != found.other.rounds:
            here = f"after {found.own.rounds} rounds, not {found.other.rounds}, on"
        with self._failing():
            raise MismatchError(
                f"parameters were written on rank {found.rank}, and {here} rank {self.mailbox.rank}; {name!r} is the first that "
                f"differs. {type(self).__name__} needs the same on all ranks: write the same at the same step, or call "
                "synchronize() on all ranks after it",
                sorted({found.rank, self.mailbox.rank}),
            )

    @property
    def compares_writes(self) -> bool:
        """True if what is written into parameters has to be the same on all ranks."""
        return False

    @property
    def follows_letters(self) -> bool:
        """True if ranks wait for one another in each round."""
        return True

    @contextlib.contextmanager
    def join(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Lets ranks have different numbers of batches: a rank that is through goes on mixing until all are.

        1. Within the block a rank announces each round in which it takes part to all others.
        2. At the end of the block it announces that it is through.
        3. It then takes part in each round that another rank has announced, without a step of its own.
        4. When all ranks are through, all have taken part in the same rounds.

        Parameters and states stay this rank's; call `synchronize()` for their mean. All ranks enter the block at the same step.

        Args:
            optimizer: not needed, for its state stays local.
        """
        if self._runtime is None:
            yield
            return
        self._joining = True
        try:
            yield
            # A round that began and has no step yet belongs to the step that is left out here.
            if self.due == "step" and self._under_way:
                self.skip_step()
            self._meet("the end of join()", equal_steps=True)
            self.wait()
        finally:
            self._joining = False

    def _meet(self, call: str, equal_steps: bool = False) -> None:
        """Takes part in the rounds that other ranks have begun, until all ranks have come to a call.

        Ranks may have different numbers of steps, such as where one has left some out.

        Args:
            call: its name.
            equal_steps: True to count all steps that others have taken, and not only those that have a round.
        """
        if self._letters is None or not self.follows_letters:
            return
        self._check_failure()
        letters, joining = self._letters, self._joining
        untouched = self._writes is not None and not self._in_step and not self._has_written()
        with self._failing():
            letters.arrive(call, self._steps, self._rounds_known)
        # Those who are at the call hear of rounds of ranks that train, and of no others.
        self._joining, self.is_through = False, True
        try:
            while True:
                with self._failing():
                    known = self._steps if equal_steps else _ANY_STEPS
                    ahead = letters.wait_for_more(known, self._rounds_known)
                if ahead is not None and self.has_to_keep():
                    # No step has taken what was written, where all that followed were left out: the round needs it.
                    with self._called():
                        self._accept_written()
                self._check_written(read=False)
                if ahead is None:
                    break
                steps, rounds = ahead
                while self._rounds_known < rounds or (equal_steps and self._steps < steps):
                    self.skip_step()
            letters.leave()
        finally:
            self._joining, self.is_through = joining, False
            if untouched and self._writes is not None:
                self._writes.mark()

    def _in_place(self, call: str) -> bool:
        """See `ModelAlgorithm._in_place`; takes part in the rounds of ranks that have taken more steps."""
        if not self._closed:
            self._meet(call)
        return super()._in_place(call)

    def close(self) -> None:
        """See `Algorithm.close`; takes part in the rounds of ranks that have taken more steps."""
        if not self._closed and self._failure is None:
            self._meet("close()")
        super().close()

    def _take_steps(self, steps: int) -> None:
        """See `Algorithm._take_steps`."""
        super()._take_steps(steps)
        self._begun_at = -1
        before = (self.turn_at(step) for step in range(steps - 1, -1, -1))
        self._rounds_known = next((turn + 1 for turn in before if turn is not None), 0)

    def _stop(self) -> None:
        """See `Algorithm._stop`."""
        super()._stop()
        if self._runtime is not None:
            self._runtime.close()

    def _communicators(self) -> list[Communicator]:
        """See `Algorithm._communicators`."""
        return [*super()._communicators(), *([] if self.mixer is None else self.mixer.communicators)]

    def _counters(self) -> EngineCounters:
        return EngineCounters(self._steps, self._wait_seconds, self._exchange_seconds)


def _rest(first: Work | None, steps: Iterator[Work]) -> Iterator[Work]:
    if first is not None:
        yield first
    with torch.no_grad():
        yield from steps
