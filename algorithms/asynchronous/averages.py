"""Averages that a courier makes beside training."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from bagua_kernels.algorithms.asynchronous.order import Event, Order
from bagua_kernels.algorithms.asynchronous.published_model import BRING, FORWARD, PublishedModel, StaleRule
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.loop import READS, Loop
from bagua_kernels.comm.mailbox import lost_error
from bagua_kernels.comm.mailbox.courier import Courier, weakly
from bagua_kernels.errors import MismatchError

_WRITTEN = 64  # kind of letters
_NUMBER = struct.Struct("<q")  # of a rest
# Calls that take the mean over all ranks: no average beside training changes it.
_MEANS = frozenset({"synchronize()", "averaged()"})


class Average(Protocol):
    """What a courier does: `TriggeredAverage`, `PairwiseAverage`."""

    @property
    def rests(self) -> bool: ...  # noqa: D102
    @property
    def rest_number(self) -> int: ...  # noqa: D102
    def rest(self, *, early: bool = False) -> object: ...  # noqa: D102
    def resume(self) -> None: ...  # noqa: D102


class Averages(Loop):
    """Base of the loops that exchange parameters beside training, whatever other ranks' training does.

    Ranks may take different numbers of steps: `close`, `synchronize` and the other collective calls wait until all ranks have
    come there. Until then this rank takes part in what the others do, with its last model.

    A subclass sets `average`, and has `after_step`. What it gives its courier holds it weakly (`weakly`), so that an algorithm
    which is deleted without `close` ends.

    Attributes:
        model: what the courier reads, and to what it owes changes.
        courier: of this rank.
        average: what the courier does.
    """

    average: Average

    def __init__(self, local: LocalModel, stale_rule: StaleRule = "conservative", order: Order | None = None) -> None:
        """Makes the courier; collective.

        Args:
            local: as for `Loop`.
            stale_rule: see `PublishedModel`.
            order: records, or replays, the order of what this rank's threads do.
        """
        super().__init__(local)
        self.model = PublishedModel(local.flat, local.mailbox, stale_rule, order)
        self.courier = Courier(local.mailbox, f"{local.name} courier")
        self.model.check = self.courier.check_serving
        self._order = order
        # By rank and number of a rest: since when the rank waits there for others to take what was written.
        self._waiting: dict[tuple[int, int], float] = {}
        # True from a forward pass of training to the next step: backward needs the parameters of that pass.
        self._in_passes = False
        self.courier.on(_WRITTEN, weakly(self._hear_written))

    def begin(self) -> None:
        """See `Loop.begin`."""
        self.model.writes = self.local.writes
        # On a GPU: the courier's stream waits for the parameters and the references, which this stream has written.
        self.model.end_write()
        self.courier.start()

    def after_step(self) -> None:
        """Called after each step of the optimizer, when the model may be read."""

    def next_version(self) -> int:
        """Returns the version of the model that a step leaves."""
        return self.local.steps

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
        """See `Loop.restart`."""
        self.model.forget_rest()
        self.set_references([bucket.flat for bucket in self.local.flat.buckets])

    def mean_sources(self) -> Iterator[torch.Tensor]:
        """See `Loop.mean_sources`."""
        return (self.model.with_rest(bucket) for bucket in self.local.flat.buckets)

    def at_forward(self, training: bool) -> None:
        """See `Loop.at_forward`."""
        self.local.check_failure()
        self._check_waiting()
        # Autograd does not notice writes through the bucket. So what is owed comes in before the first pass of a step only.
        if training and not self._in_passes:
            self._bring_in(FORWARD)
            self._in_passes = True

    def at_step_begin(self) -> None:
        """See `Loop.at_step_begin`."""
        self.local.check_frozen()
        self.wait()
        self._resume()
        self.model.begin_write()

    def at_step_end(self) -> None:
        """See `Loop.at_step_end`."""
        with self.local.failing():
            self.model.end_write(self.next_version())
            self.after_step()
        self.local.steps += 1
        self._in_passes = False

    def wait(self) -> None:
        """See `Loop.wait`."""
        local = self.local
        # What was written stays until the next step begins, and what is owed stays owed.
        if local.at_point or not local.has_to_keep():
            self._bring_in(BRING)
            if local.in_step and not local.at_point:
                local.mark()

    def take_written(self, values: list[torch.Tensor]) -> None:
        """See `Loop.take_written`; all ranks meet, and none has what is owed for earlier models."""
        communicator = self.local.communicator
        self._resume()
        # With the number: another rank may still be on its way out of the rest before.
        number = _NUMBER.pack(self.average.rest_number)
        for peer in range(communicator.size):
            if peer != communicator.rank:
                self.courier.post(peer, _WRITTEN, number)
        self._drop_waiting(self._rest_once(changes=True))
        self.local.put(values)
        self._refer()
        self.model.end_write()

    def is_part_of_step(self) -> bool:
        """See `Loop.is_part_of_step`; not if another rank waits for this one to take what was written."""
        return super().is_part_of_step() and not self._waiting

    def _hear_written(self, sender: int, body: bytes) -> None:
        (number,) = _NUMBER.unpack(body)
        self._waiting[sender, number] = self.local.mailbox.clock.now()

    def _drop_waiting(self, rest: int) -> bool:
        """Drops the ranks that waited in a rest, which has ended; returns True if there were any."""
        ended = [key for key in list(self._waiting) if key[1] <= rest]
        for key in ended:
            del self._waiting[key]
        return bool(ended)

    def _check_waiting(self) -> None:
        """Raises if a rank whose parameters were written is lost, or has waited for this one for the timeout."""
        local, lost = self.local, self.courier.lost
        if gone := sorted({rank for rank, _ in list(self._waiting)} & set(lost)):
            with local.failing():
                raise lost_error("its wait for other ranks to take what was written to its parameters", gone, lost)
        now, timeout = local.mailbox.clock.now(), local.mailbox.timeout
        late = [rank for (rank, _), since in list(self._waiting.items()) if now - since > timeout]
        if late:
            with local.failing():
                raise MismatchError(
                    f"parameters were written on rank {late[0]} {timeout:g} s ago, and not on rank {local.mailbox.rank}: "
                    "write them on all ranks at the same step, or call synchronize() on all ranks after it",
                    sorted({late[0], local.mailbox.rank}),
                )

    def _bring_in(self, event: Event) -> None:
        local = self.local
        local.check_failure()
        with local.failing():
            # An exception within a step has left it without an end.
            self.model.end_write()
            local.flat.check()
            begin = time.perf_counter()
            self.courier.check()
            self.before_training()
            local.wait_seconds += time.perf_counter() - begin
            self.model.bring_in(event)

    def arrive(self, call: str) -> None:
        """See `Loop.arrive`."""
        # What is owed stays owed where a backward pass is to follow.
        only_reads = self.local.in_step and call in READS
        if not only_reads:
            self.wait()
        # The callers read and write buckets.
        self.local.flat.check()
        self._rest(changes=not only_reads, early=call in _MEANS)

    def _resume(self) -> None:
        if self.average.rests:
            self.average.resume()
            self.resumed()

    def _rest(self, *, changes: bool = True, early: bool = False) -> None:
        while self._drop_waiting(self._rest_once(changes=changes, early=early)):
            # That was for parameters that others have written. They go on, and come to this call later.
            self._refer()

    def _rest_once(self, *, changes: bool, early: bool = False) -> int:
        """Rests until all ranks do; returns the number of the rest."""
        local, writes = self.local, self.local.writes
        with local.failing():
            # Others may have trained since the last rest, and need this rank until they have come here.
            self._resume()
            written = local.has_to_keep()
            values = local.flat.copies() if written else []
            marks = [] if writes is None else writes.marks()
            if writes is not None:
                # Others may need this rank's model to come to their rests. What they make of it is dropped here.
                writes.mark()
            self.average.rest(early=early)
            if changes:
                self.model.bring_in()
            elif writes is not None:
                writes.restore(marks)
            if written:
                local.put(values)
            return self.average.rest_number

    def finish(self) -> None:
        """See `Loop.finish`; takes part in what other ranks do until all have come here."""
        self.wait()
        self._rest()
        self.wait()

    def stop(self) -> None:
        """See `Loop.stop`."""
        self.courier.end(f"{self.local.title} was closed")
        if self._order is not None:
            self._order.save()

    def load_vectors(self, states: Sequence[Mapping[str, Any]]) -> None:
        """See `Loop.load_vectors`."""
        super().load_vectors(states)
        self._refer()

    def _refer(self) -> None:
        """Sets the references to rank 0's parameters; collective. Ranks have other ones each, and any will do that all have."""
        if not self.has_references:
            return
        vectors = self.local.flat.copies()
        for vector in vectors:
            self.local.communicator.broadcast(vector, 0).wait()
        self.set_references(vectors)
