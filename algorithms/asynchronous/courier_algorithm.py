"""Algorithms whose exchanges a courier makes beside training."""

from __future__ import annotations

import abc
import time
from typing import Any, Protocol

import torch

from bagua_kernels.algorithms.asynchronous.order import Event, Order
from bagua_kernels.algorithms.asynchronous.published_model import BRING, FORWARD, PublishedModel, StaleRule
from bagua_kernels.algorithms.engine.member import EngineCounters
from bagua_kernels.algorithms.model_algorithm import READS, ModelAlgorithm
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Mailbox
from bagua_kernels.comm.mailbox import lost_error
from bagua_kernels.comm.mailbox.courier import Courier, weakly
from bagua_kernels.errors import MismatchError

_WRITTEN = 64  # kind of letters


class Average(Protocol):
    """What a courier does: `TriggeredAverage`, `PairwiseAverage`."""

    @property
    def rests(self) -> bool: ...  # noqa: D102
    def rest(self) -> object: ...  # noqa: D102
    def resume(self) -> None: ...  # noqa: D102


class CourierAlgorithm(ModelAlgorithm):
    """Base of the algorithms that exchange parameters beside training, whatever other ranks' training does.

    Ranks may take different numbers of steps: `close`, `synchronize` and the other collective calls wait until all ranks have
    come there. Until then this rank takes part in what the others do, with its last model.

    A subclass has `make_average` and `after_step`. What it gives its courier holds it weakly (`weakly`), so that an algorithm
    which is deleted without `close` ends.

    Attributes:
        stale_rule: see `PublishedModel`.
    """

    stale_rule: StaleRule = "conservative"
    _wait_seconds = 0.0
    # True from a forward pass of training to the next step: backward needs the parameters of that pass.
    _in_passes = False

    def order(self) -> Order | None:
        """Returns what records, or replays, the order of what this rank's threads do."""
        return None

    @abc.abstractmethod
    def make_average(self, courier: Courier, model: PublishedModel) -> Average:
        """Gives a courier its work; collective."""

    @abc.abstractmethod
    def after_step(self) -> None:
        """Called after each step of the optimizer, when the model may be read."""

    def next_version(self) -> int:
        """Returns the version of the model that a step leaves."""
        return self._steps

    def resumed(self) -> None:
        """Called after a rest, before training goes on."""

    def before_training(self) -> None:
        """Waits for what must be in the model before the next pass or step of training."""

    @property
    def has_references(self) -> bool:
        """True if models are compared with vectors before they are encoded."""
        return False

    def set_references(self, vectors: list[torch.Tensor]) -> None:
        """Sets what models are compared with before they are encoded.

        Args:
            vectors: one for each bucket, the same on all ranks.
        """

    def restart(self) -> None:
        """See `ModelAlgorithm.restart`."""
        self.model.forget_rest()
        self.set_references([bucket.flat for bucket in self.flat.buckets])

    def mean_source(self, bucket: Bucket) -> torch.Tensor:
        """See `ModelAlgorithm.mean_source`."""
        return self.model.with_rest(bucket)

    def open(self, mailbox: Mailbox) -> None:
        """See `ModelAlgorithm.open`."""
        self._order = self.order()
        self.model = PublishedModel(self.flat, mailbox, self.stale_rule, self._order)
        self.courier = Courier(mailbox, f"{self.name} courier")
        self.model.check = self.courier.check_serving
        self.average = self.make_average(self.courier, self.model)
        self._waiting: dict[int, float] = {}
        self.courier.on(_WRITTEN, weakly(self._hear_written))
        self.courier.end_with(self)

    def _start(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """See `Algorithm._start`."""
        super()._start(module, optimizer)
        self.model.writes = self._writes
        # On a GPU: the courier's stream waits for the parameters and the references, which this stream has written.
        self.model.end_write()
        self.courier.start()

    def at_forward(self, training: bool) -> None:
        """See `ModelAlgorithm.at_forward`."""
        self._check_failure()
        self._check_waiting()
        # Autograd does not notice writes through the bucket. So what is owed comes in before the first pass of a step only.
        if training and not self._in_passes:
            self._bring_in(FORWARD)
            self._in_passes = True

    def at_step_begin(self) -> None:
        """See `ModelAlgorithm.at_step_begin`."""
        self._check_untrained()
        self.wait()
        if self._points is not None:
            self._resume()
            self.model.begin_write()

    def at_step_end(self) -> None:
        """See `ModelAlgorithm.at_step_end`."""
        with self._failing():
            self.model.end_write(self.next_version())
            self.after_step()
        self._steps += 1
        self._in_passes = False

    def wait(self) -> None:
        """See `ModelAlgorithm.wait`."""
        # What was written stays until the next step begins, and what is owed stays owed.
        if self._at_point or self._points is None or not self.has_to_keep():
            self._bring_in(BRING)
            if self._in_step and not self._at_point:
                self.mark()

    def take_written(self, values: list[torch.Tensor]) -> None:
        """See `ModelAlgorithm.take_written`; all ranks meet, and none has what is owed for models of before."""
        for peer in range(self._communicator.size):
            if peer != self._communicator.rank:
                self.courier.post(peer, _WRITTEN, b"")
        self._rest_once(changes=True)
        self._waiting.clear()
        self._put(values)
        self._refer()
        self.model.end_write()

    def is_part_of_step(self) -> bool:
        """See `ModelAlgorithm.is_part_of_step`; not if another rank waits for this one to take what was written."""
        return super().is_part_of_step() and not self._waiting

    def _hear_written(self, sender: int, _: bytes) -> None:
        self._waiting[sender] = self.mailbox.clock.now()

    def _check_waiting(self) -> None:
        """Raises if a rank whose parameters were written is lost, or has waited for this one for the timeout."""
        lost = self.courier.lost
        if gone := [rank for rank in list(self._waiting) if rank in lost]:
            with self._failing():
                raise lost_error("its wait for other ranks to take what was written to its parameters", gone, lost)
        now, timeout = self.mailbox.clock.now(), self.mailbox.timeout
        late = [rank for rank, since in list(self._waiting.items()) if now - since > timeout]
        if late:
            with self._failing():
                raise MismatchError(
                    f"parameters were written on rank {late[0]} {timeout:g} s ago, and not on rank {self.mailbox.rank}: "
                    "write them on all ranks at the same step, or call synchronize() on all ranks after it",
                    sorted({late[0], self.mailbox.rank}),
                )

    def _bring_in(self, event: Event) -> None:
        self._check_failure()
        if self._points is None:
            return
        with self._failing():
            # An exception within a step has left it without an end.
            self.model.end_write()
            self.flat.check()
            begin = time.perf_counter()
            self.courier.check()
            self.before_training()
            self._wait_seconds += time.perf_counter() - begin
            self.model.bring_in(event)

    def _in_place(self, call: str) -> bool:
        """See `ModelAlgorithm._in_place`; collective, also for ranks that have taken different numbers of steps."""
        several = super()._in_place(call)
        if several:
            self._rest(changes=not self._only_reads(call))
        return several

    def _only_reads(self, call: str) -> bool:
        """Returns True if a call leaves parameters as they are, between a forward and its backward pass."""
        return self._in_step and call in READS

    def _end_exchanges(self, call: str) -> None:
        """See `ModelAlgorithm._end_exchanges`; what is owed stays owed where a backward pass is to follow."""
        if not self._only_reads(call):
            self.wait()

    def _resume(self) -> None:
        if self.average.rests:
            self.average.resume()
            self.resumed()

    def _rest(self, *, changes: bool = True) -> None:
        self._rest_once(changes=changes)
        while self._waiting:
            # That was for parameters that others have written. They go on, and come to this call later.
            self._waiting.clear()
            self._refer()
            self._rest_once(changes=changes)

    def _rest_once(self, *, changes: bool) -> None:
        with self._failing():
            # Others may have trained since the last rest, and need this rank until they have come here.
            self._resume()
            written = self.has_to_keep()
            values = self.flat.copies() if written else []
            marks = [] if self._writes is None else self._writes.marks()
            if self._writes is not None:
                # Others may need this rank's model to come to their rests. What they make of it is dropped here.
                self._writes.mark()
            self.average.rest()
            if changes:
                self.model.bring_in()
            elif self._writes is not None:
                self._writes.restore(marks)
            if written:
                self._put(values)

    def close(self) -> None:
        """See `Algorithm.close`; takes part in what other ranks do until all have come here."""
        if not self._closed and self._failure is None and self._points is not None:
            self.wait()
            self._rest()
        super().close()

    def _stop(self) -> None:
        """See `Algorithm._stop`."""
        super()._stop()
        # A constructor that failed may have made neither.
        courier, order = getattr(self, "courier", None), getattr(self, "_order", None)
        if courier is not None:
            courier.end(f"{type(self).__name__} was closed")
        if order is not None:
            order.save()

    def _counters(self) -> EngineCounters:
        return EngineCounters(self._steps, self._wait_seconds, 0.0)

    @torch.no_grad()
    def _load(self, states: list[Any]) -> None:
        """See `Algorithm._load`."""
        super()._load(states)
        if self._points is not None:
            self._refer()

    def _refer(self) -> None:
        """Sets the references to rank 0's parameters; collective. Ranks have other ones each, and any will do that all have."""
        if not self.has_references:
            return
        vectors = self.flat.copies()
        for vector in vectors:
            self._communicator.broadcast(vector, 0).wait()
        self.set_references(vectors)
