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
        # For each bucket; None for those that stay as they are.
        self._replacement: list[torch.Tensor | None] | None = None
        self._group_mean: tuple[list[torch.Tensor | None], int] | None = None
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
        return [torch.empty_like(bucket.flat) for bucket in self._flat.buckets]

    @contextlib.contextmanager
    def _beside_training(self, event: Event) -> Iterator[None]:
        """Holds the lock while no optimizer writes; streams wait for one another, and hosts do not."""
        with self._changed:
            self._wait_until(
                lambda: not self._writing,
                "an optimizer's step has not ended within {:g} s, or has raised an exception: catch it outside of the "
                "algorithm's `with` block, or raise timeout=",
            )
            self._take_turn(event)
            self._wait_for(self._written)
            yield
            self._copied = self._event()

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
        self._wait_for_values()
        with self._beside_training(Event("read")):
            if self._is_written():
                # An older model, which counts as such.
                for last, copy in zip(self._last, out, strict=True):
                    if copy is not last:
                        copy.copy_(last)
                self._last = list(out)
                return self._last_version, self._resting
            sources = self._sources()
            for source, bucket, copy in zip(sources, self._flat.buckets, out, strict=True):
                if self._owed:
                    torch.add(source, self._debt(bucket), out=copy)
                else:
                    copy.copy_(source)
            # The courier may be behind when training drops the parameters.
            keep_memory(sources)
            self._last, self._last_version = list(out), self.version
            return self.version, self._resting

    def _is_written(self) -> bool:
        return (
            self.writes is not None
            and bool(self._last)
            and not self._resting
            and self.writes.found(beside_training=True)
        )

    def _wait_for_values(self) -> None:
        """Waits while parameters are written by others, where nothing was read before that could be published instead."""
        if self._last or self.writes is None:
            return
        writes = self.writes
        with self._changed:
            self._wait_until(
                lambda: self._writing or self._resting or not writes.found(beside_training=True),
                "parameters have had values from outside for {:g} s, which no step has taken: train on, put them back, or raise "
                "timeout=",
            )

    def rest(self, resting: bool) -> None:
        """See `Publisher.rest`."""
        with self._changed:
            self._take_turn(Event("rest" if resting else "resume"))
            self._resting = resting

    @torch.no_grad()
    def receive(self, execution: Execution, read: Sequence[torch.Tensor], mean: Sequence[torch.Tensor]) -> None:
        """See `Publisher.receive`."""
        with self._beside_training(Event("receive", execution)):
            exchanged = [own is not other for own, other in zip(read, mean, strict=True)]
            if execution.fresh:
                sources = self._sources()
                for bucket, source, own, new in zip(self._flat.buckets, sources, read, exchanged, strict=True):
                    if new and self._keeps_rest(bucket):
                        # What was read lacks it.
                        self._debt(bucket).add_(source).sub_(own)
                    elif new and self._owed:
                        self._debt(bucket).zero_()
                before = self._replacement or [None] * len(read)
                self._replacement = [
                    each.clone() if new else old for each, old, new in zip(mean, before, exchanged, strict=True)
                ]
                self._group_mean, self._owed = None, self._owed and not all(exchanged)
            elif self._rule == "paper":
                means = [each.clone() if new else None for each, new in zip(mean, exchanged, strict=True)]
                self._group_mean = means, len(execution.members)
            else:
                for bucket, own, other, new in zip(self._flat.buckets, read, mean, exchanged, strict=True):
                    if new:
                        debt = self._debt(bucket)
                        # In memory that is there: one of a bucket's size would be mapped anew each time.
                        debt.add_(other.sub_(own) if other.dtype == debt.dtype else other.to(debt.dtype) - own)
                self._owed = True

    @torch.no_grad()
    def owe(self, difference: Sequence[torch.Tensor]) -> None:
        """See `Debtor.owe`."""
        with self._beside_training(Event("owe")):
            for bucket, each in zip(self._flat.buckets, difference, strict=True):
                self._debt(bucket).add_(each)
            self._owed = True

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
                if self._replacement is not None and (replacement := self._replacement[place]) is not None:
                    bucket.flat.copy_(replacement)
                means, members = self._group_mean or ([], 0)
                if means and (mean := means[place]) is not None:
                    total = bucket.flat.to(torch.promote_types(bucket.flat.dtype, torch.float32))
                    bucket.flat.copy_(divide_(total.add(mean, alpha=members), members + 1))
                if self._owed and self._keeps_rest(bucket):
                    debt = self._debt(bucket).add_(bucket.flat)
                    bucket.flat.copy_(debt)
                    debt.sub_(bucket.flat)
                elif self._owed:
                    bucket.flat.add_(self._debt(bucket))
                    self._debt(bucket).zero_()
            # The courier's stream has made these tensors. It would reuse their memory at once, while this stream reads it.
            made = [*(self._replacement or []), *(self._group_mean[0] if self._group_mean else [])]
            keep_memory([each for each in made if each is not None])
            self._replacement = self._group_mean = None
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

    def _debt(self, bucket: Bucket) -> torch.Tensor:
        debt = self._flat.kept(bucket, "debt", saved=self._keeps_rest(bucket))
        keep_memory([debt])
        return debt

    def _sources(self) -> list[torch.Tensor]:
        buckets = self._flat.buckets
        replaced = self._replacement or [None] * len(buckets)
        return [bucket.flat if each is None else each for each, bucket in zip(replaced, buckets, strict=True)]

    @staticmethod
    def _keeps_rest(bucket: Bucket) -> bool:
        return bucket.flat.dtype.itemsize < 4

    def with_rest(self, bucket: Bucket) -> torch.Tensor:
        """Returns the parameters of a bucket with what they are too short for, when nothing else is owed."""
        return bucket.flat + self._debt(bucket) if self._keeps_rest(bucket) else bucket.flat

    @torch.no_grad()
    def forget_rest(self) -> None:
        """Forgets what parameters are too short for, when all ranks have the same ones."""
        for bucket in self._flat.buckets:
            if self._keeps_rest(bucket):
                self._debt(bucket).zero_()

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
