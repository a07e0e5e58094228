"""A model that a courier reads, and to which it owes changes, while a training thread changes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch

from bagua_kernels.algorithms.asynchronous.order import Event, Order
from bagua_kernels.algorithms.models.flat_parameters import FlatParameters
from bagua_kernels.algorithms.models.writes import Writes
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Mailbox
from bagua_kernels.comm.mailbox.triggered import Execution
from bagua_kernels.errors import CollectiveTimeoutError
from bagua_kernels.quotient import divide_
from bagua_kernels.streams import keep_memory

StaleRule = Literal["conservative", "paper"]
BRING, FORWARD, WRITE = Event("bring"), Event("forward"), Event("write")
_LOOKS = 0.05  # seconds between two looks


class PublishedModel:
    """Flat parameters that two threads share.

    Only the training thread writes parameters: an evaluation may run at any time. What the courier makes is kept beside them
    until the training thread brings it in. `read` includes it in the meantime. What parameters of half precision are too
    short for stays owed, in float32: many small changes would be lost one by one.

    Attributes:
        version: of the parameters; the training thread sets it at the end of a step.
        writes: by which it is known whether others have written parameters. Such parameters are not published: they may be there
            for an evaluation only.
        check: called while a thread waits for the other one; what it raises ends the wait.
    """

    def __init__(
        self, flat: FlatParameters, mailbox: Mailbox, stale_rule: StaleRule = "conservative", order: Order | None = None
    ) -> None:
        """Begins with nothing owed.

        Args:
            flat: the parameters.
            mailbox: whose clock and timeout count.
            stale_rule: what becomes of the mean of a group to which this rank contributed an older model. "conservative": the
                difference between the mean and what was contributed is added, so that the sum over all ranks stays the same.
                "paper": the model becomes (S mean + x) / (S + 1), S the number of members.
            order: which records the order of what both threads do, or has them follow a record.
        """
        self._flat, self._rule, self._order = flat, stale_rule, order
        self._changed, self._clock, self._timeout = mailbox.clock.condition(), mailbox.clock, mailbox.timeout
        self._writing = self._resting = self._owed = False
        # Of buckets that keep no rest; with others, the first one that is owed makes it.
        self._debts: list[torch.Tensor] | None = None
        self._spare: list[list[torch.Tensor]] = []  # memory that `buffers` gives out again
        self._replacement: list[torch.Tensor] | None = None
        self._group_mean: tuple[list[torch.Tensor], int] | None = None
        self._device = flat.buckets[0].flat.device if flat.buckets else torch.device("cpu")
        # On a GPU: what was queued before a moment at which the other thread may go on.
        self._written = self._event()
        self._copied: torch.cuda.Event | None = None
        self.version = -1
        self.writes: Writes | None = None
        self.check: Callable[[], object] | None = None
        self._last: list[torch.Tensor] = []  # what was read last, with its version
        self._last_version = -1

    def buffers(self) -> list[torch.Tensor]:
        """Returns memory for a copy of each bucket, in the parameters' dtype."""
        with self._changed:
            if self._spare and self._device.type == "cpu":
                return self._spare.pop()
        return [torch.empty_like(bucket.flat) for bucket in self._flat.buckets]

    def _return(self, vectors: list[torch.Tensor] | None) -> None:
        """Takes back memory of `buffers`; on a GPU the allocator does, in the order of streams."""
        if vectors is None or self._device.type != "cpu" or self._spare:
            return
        # Differences may be wider than parameters.
        if all(each.dtype == bucket.flat.dtype for each, bucket in zip(vectors, self._flat.buckets, strict=True)):
            self._spare.append(vectors)

    @contextlib.contextmanager
    def _beside_training(self, event: Event) -> Iterator[None]:
        """Holds the lock while no optimizer writes; streams wait for one another, and hosts do not."""
        with self._changed:
            self._await_step_end()
            self._take_turn(event)
            self._wait_for(self._written)
            yield
            self._copied = self._event()

    def _await_step_end(self) -> None:
        """Waits while an optimizer writes; the caller holds the lock, as for the other waits."""
        self._wait_until(
            lambda: not self._writing,
            "an optimizer's step has not ended within {:g} s, or has raised an exception: catch it outside of the "
            "algorithm's `with` block, or raise timeout=",
        )

    def _take_turn(self, event: Event) -> None:
        """Waits until a record has this event next; the caller holds the lock."""
        if self._order is None:
            return
        order = self._order
        self._wait_until(
            lambda: order.is_next(event), f"the replayed record does not go on with {event} within {{:g}} s"
        )
        order.add(event)
        self._changed.notify_all()

    def _wait_until(self, predicate: Callable[[], bool], text: str) -> None:
        deadline = self._clock.now() + self._timeout
        while not predicate():
            if self.check is not None:
                self.check()
            left = deadline - self._clock.now()
            if left <= 0:
                raise CollectiveTimeoutError(text.format(self._timeout))
            # Writes by others are no event.
            self._changed.wait(min(left, _LOOKS))

    @torch.no_grad()
    def read(self, out: Sequence[torch.Tensor]) -> tuple[int, bool]:
        """See `Publisher.read`."""
        with self._changed:
            self._await_values()
        with self._beside_training(Event("read")):
            while True:
                count = self._count_writes()
                if self._is_written():
                    break
                self._copy_to(out)
                # A write from outside may have begun meanwhile, and may have been put back, too. Then the copy may be of both
                # models.
                if not self._has_values_from_outside() and self._count_writes() == count:
                    self._last, self._last_version = list(out), self.version
                    return self.version, self._resting
                if any(copy is last for last, copy in zip(self._last, out, strict=False)):
                    self._last = []
                self._await_values()
                self._await_step_end()
                self._wait_for(self._written)
            # An older model, which counts as such.
            for last, copy in zip(self._last, out, strict=True):
                if copy is not last:
                    copy.copy_(last)
            self._last = list(out)
            return self._last_version, self._resting

    def _copy_to(self, out: Sequence[torch.Tensor]) -> None:
        sources = self._sources()
        for place, (source, copy) in enumerate(zip(sources, out, strict=True)):
            if self._owed:
                torch.add(source, self._debt(place), out=copy)
            else:
                copy.copy_(source)
        # The courier may be behind when training drops the parameters.
        keep_memory(sources)

    def _has_values_from_outside(self) -> bool:
        return self.writes is not None and not self._resting and self.writes.found(beside_training=True)

    def _count_writes(self) -> int:
        return 0 if self.writes is None else self.writes.count()

    def _is_written(self) -> bool:
        return bool(self._last) and self._has_values_from_outside()

    def _await_values(self) -> None:
        """Waits while parameters are written by others, where nothing was read before that could be published instead."""
        self._wait_until(
            lambda: bool(self._last) or self._writing or not self._has_values_from_outside(),
            "parameters have had values from outside for {:g} s, which no step has taken: train on, put them back, or raise "
            "timeout=",
        )

    def rest(self, resting: bool) -> None:
        """See `Publisher.rest`."""
        with self._changed:
            self._take_turn(Event("rest" if resting else "resume"))
            self._resting = resting

    @torch.no_grad()
    def receive(self, execution: Execution, read: Sequence[torch.Tensor], mean: list[torch.Tensor]) -> None:
        """See `Publisher.receive`."""
        with self._beside_training(Event("receive", execution)):
            if execution.fresh:
                for place, (source, own) in enumerate(zip(self._sources(), read, strict=True)):
                    if self._keeps_rest(place):
                        # What was read lacks it.
                        self._debt(place).add_(source).sub_(own)
                for unused in (self._debts, self._replacement, self._group_mean and self._group_mean[0]):
                    self._return(unused)
                self._replacement, self._debts, self._group_mean, self._owed = mean, None, None, False
            elif self._rule == "paper":
                self._return(self._group_mean and self._group_mean[0])
                self._group_mean = mean, len(execution.members)
            else:
                for place, (own, other) in enumerate(zip(read, mean, strict=True)):
                    if self._keeps_rest(place):
                        self._debt(place).add_(other.float() - own.float())
                    else:
                        other.sub_(own)
                self._add(mean)

    @torch.no_grad()
    def owe(self, difference: list[torch.Tensor]) -> None:
        """See `Debtor.owe`."""
        with self._beside_training(Event("owe")):
            for place, each in enumerate(difference):
                if self._keeps_rest(place):
                    self._debt(place).add_(each)
            self._add(difference)

    def _add(self, difference: list[torch.Tensor]) -> None:
        """Adds to what is owed to buckets that keep no rest; the memory may become that of the sum."""
        self._owed = True
        if self._debts is None:
            self._debts = difference
            keep_memory(difference)
            return
        for place, (debt, each) in enumerate(zip(self._debts, difference, strict=True)):
            if not self._keeps_rest(place):
                debt.add_(each)
        self._return(difference)

    @torch.no_grad()
    def bring_in(self, event: Event = BRING) -> None:
        """Makes all that is owed part of the parameters, on the training thread.

        Args:
            event: what it is in a record.
        """
        with self._changed:
            self._take_turn(event)
            if not (self._owed or self._replacement or self._group_mean):
                return
            self._wait_for(self._copied)
            for place, bucket in enumerate(self._flat.buckets):
                if self._replacement is not None:
                    bucket.flat.copy_(self._replacement[place])
                if self._group_mean is not None:
                    means, members = self._group_mean
                    total = bucket.flat.to(torch.promote_types(bucket.flat.dtype, torch.float32))
                    bucket.flat.copy_(divide_(total.add(means[place], alpha=members), members + 1))
                if self._owed and self._keeps_rest(place):
                    debt = self._debt(place).add_(bucket.flat)
                    bucket.flat.copy_(debt)
                    debt.sub_(bucket.flat)
                elif self._owed:
                    bucket.flat.add_(self._debt(place))
            # The courier's stream has made these tensors. It would reuse their memory at once, while this stream reads it.
            for unused in (self._replacement, self._group_mean and self._group_mean[0], self._debts):
                keep_memory(unused or [])
                self._return(unused)
            self._replacement = self._group_mean = self._debts = None
            self._owed = False
            if self.writes is not None:
                self.writes.mark()
            self._written = self._event()

    def begin_write(self) -> None:
        """Keeps readers away until `end_write`; on the training thread."""
        with self._changed:
            # In its turn, for the courier reads no model that is being written: a replayed read must come first.
            self._take_turn(WRITE)
            self._wait_for(self._copied)
            self._writing = True

    def end_write(self, version: int | None = None) -> None:
        """Lets readers in; on the training thread.

        Args:
            version: of the parameters from now on; None if a step was given up, or there was none.
        """
        with self._changed:
            if version is not None:
                self._take_turn(Event("step"))
                self.version = version
                if self.writes is not None:
                    self.writes.mark()
            self._written = self._event()
            self._writing = False
            self._changed.notify_all()

    def _debt(self, place: int) -> torch.Tensor:
        """Returns what is owed to a bucket; with a rest it is kept even if nothing else is owed."""
        if self._keeps_rest(place):
            debt = self._flat.kept(self._flat.buckets[place], "debt")
        else:
            assert self._debts is not None
            debt = self._debts[place]
        keep_memory([debt])
        return debt

    def _sources(self) -> list[torch.Tensor]:
        return self._replacement or [bucket.flat for bucket in self._flat.buckets]

    def _keeps_rest(self, place: int) -> bool:
        return self._flat.buckets[place].flat.dtype.itemsize < 4

    def with_rest(self, bucket: Bucket) -> torch.Tensor:
        """Returns the parameters of a bucket with what they are too short for, when nothing else is owed."""
        return bucket.flat + self._debt(bucket.index) if self._keeps_rest(bucket.index) else bucket.flat

    @torch.no_grad()
    def forget_rest(self) -> None:
        """Forgets what parameters are too short for, when all ranks have the same ones."""
        for bucket in self._flat.buckets:
            if self._keeps_rest(bucket.index):
                self._debt(bucket.index).zero_()

    def _event(self) -> torch.cuda.Event | None:
        """Returns an event behind the work of the current stream of the parameters' device; None on a CPU."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _wait_for(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
