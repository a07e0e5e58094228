"""A model that a courier reads, and to which it owes changes, while a training thread changes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch

from bagua_kernels.algorithms.asynchronous.order import Event, Order
from bagua_kernels.algorithms.rounds.flat_parameters import FlatParameters
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Mailbox
from bagua_kernels.comm.mailbox.triggered import Execution
from bagua_kernels.errors import CollectiveTimeoutError
from bagua_kernels.quotient import divide_
from bagua_kernels.streams import keep_memory

StaleRule = Literal["conservative", "paper"]
BRING, FORWARD, WRITE = Event("bring"), Event("forward"), Event("write")


class PublishedModel:
    """Flat parameters that two threads share.

    Only the training thread writes parameters: an evaluation may run at any time. What the courier makes is kept beside them
    until the training thread brings it in. It is part of all that is read until then.

    Attributes:
        version: of the parameters; the training thread sets it at the end of a step.
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
        self._replacement: list[torch.Tensor] | None = None
        self._group_mean: tuple[list[torch.Tensor], int] | None = None
        self._device = flat.buckets[0].flat.device if flat.buckets else torch.device("cpu")
        # On a GPU: what was queued before a moment at which the other thread may go on.
        self._written = self._event()
        self._copied: torch.cuda.Event | None = None
        self.version = -1

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
            left = deadline - self._clock.now()
            if left <= 0:
                raise CollectiveTimeoutError(text.format(self._timeout))
            self._changed.wait(left)

    @torch.no_grad()
    def read(self, out: Sequence[torch.Tensor]) -> tuple[int, bool]:
        """See `Publisher.read`."""
        with self._beside_training(Event("read")):
            sources = self._replacement or [bucket.flat for bucket in self._flat.buckets]
            for source, bucket, copy in zip(sources, self._flat.buckets, out, strict=True):
                if self._owed:
                    copy.copy_(source + self._debt(bucket))
                else:
                    copy.copy_(source)
            # The courier may be behind when training drops the parameters.
            keep_memory(sources)
            return self.version, self._resting

    def rest(self, resting: bool) -> None:
        """See `Publisher.rest`."""
        with self._changed:
            self._take_turn(Event("rest" if resting else "resume"))
            self._resting = resting

    @torch.no_grad()
    def receive(self, execution: Execution, read: Sequence[torch.Tensor], mean: Sequence[torch.Tensor]) -> None:
        """See `Publisher.receive`."""
        with self._beside_training(Event("receive", execution)):
            if execution.fresh:
                self._replacement, self._group_mean = [each.clone() for each in mean], None
                self._clear_debt()
            elif self._rule == "paper":
                self._group_mean = [each.clone() for each in mean], len(execution.members)
            else:
                for bucket, own, other in zip(self._flat.buckets, read, mean, strict=True):
                    debt = self._debt(bucket)
                    debt.add_(other.to(debt.dtype) - own.to(debt.dtype))
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
                if self._replacement is not None:
                    bucket.flat.copy_(self._replacement[place])
                if self._group_mean is not None:
                    means, members = self._group_mean
                    total = bucket.flat.to(torch.promote_types(bucket.flat.dtype, torch.float32))
                    bucket.flat.copy_(divide_(total.add(means[place], alpha=members), members + 1))
                if self._owed:
                    bucket.flat.copy_(bucket.flat + self._debt(bucket))
            # The courier's stream has made these tensors. It would reuse their memory at once, while this stream reads it.
            keep_memory(self._replacement or [])
            keep_memory(self._group_mean[0] if self._group_mean else [])
            self._replacement = self._group_mean = None
            self._clear_debt()
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
            self._written = self._event()
            self._writing = False
            self._changed.notify_all()

    def _debt(self, bucket: Bucket) -> torch.Tensor:
        debt = self._flat.kept(bucket, "debt", saved=False)
        keep_memory([debt])
        return debt

    def _clear_debt(self) -> None:
        if self._owed:
            for bucket in self._flat.buckets:
                self._debt(bucket).zero_()
        self._owed = False

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
