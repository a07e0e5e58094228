"""Rounds of local steps for which some of the ranks are enough."""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Unpack

import torch

from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.gathered import GatheredMean
from bagua_kernels.algorithms.local_steps.kind import kind_of
from bagua_kernels.algorithms.local_steps.local_rounds import LocalOptions, LocalRounds
from bagua_kernels.algorithms.local_steps.quorum_merges import Merged, QuorumMerges, check_quorum
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Mailbox
from bagua_kernels.comm.mailbox.group_mean import group_mean
from bagua_kernels.errors import RankLostError
from bagua_kernels.launchers import elementwise
from bagua_kernels.rules.outer import REBASED

_MEANS = 1 << 62  # numbers of exchanges from here on are those of means at a rest


class QuorumRounds(LocalRounds):
    """Base of `OuterLoop`: what it does if a quorum of ranks is enough for an outer step.

    Attributes:
        quorum: see `OuterLoop`.
        grace: see `OuterLoop`.
        takes_quorum: True if an outer step needs no more of other ranks than their mean.
    """

    takes_quorum = True

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        quorum: int | None,
        grace: float,
        **options: Unpack[LocalOptions],
    ) -> None:
        """Wraps a module; collective over all ranks; arguments as for `OuterLoop`."""
        refused = {
            "by_speed": options["by_speed"],
            "penalty": options["penalty"] is not None,
            "sync_state": options["sync_state"] is not None,
        }
        check_quorum(quorum, grace, refused)
        if quorum is not None and not self.takes_quorum:
            raise ValueError(f"{type(self).__name__} needs all ranks in step, got {quorum=}: use DiLoCo instead")
        self.quorum, self.grace = quorum, grace
        self._merges: QuorumMerges | None = None
        self._merged: dict[int, list[Merged]] = {}
        self._left: Sequence[int] = ()
        self._means = self._posted_at = 0
        super().__init__(module, optimizer, **options)

    @abc.abstractmethod
    def start(self, bucket: Bucket) -> torch.Tensor:
        """Returns the outer parameters of a bucket, float32, which are the same on all ranks."""

    @abc.abstractmethod
    def outer_step(self, bucket: Bucket, start: torch.Tensor, mean: torch.Tensor, turn: int) -> None:
        """See `OuterLoop.outer_step`."""

    def open_quorum(self, mailbox: Mailbox, exchanges: Sequence[Exchange]) -> None:
        """Begins to serve a quorum, if there is one.

        Args:
            mailbox: of this rank.
            exchanges: of all buckets.
        """
        if self.quorum is None:
            return
        if self.quorum > mailbox.size:
            raise ValueError(f"quorum must be at most the number of ranks, {mailbox.size}, got {self.quorum}")
        if mailbox.device.type != "cpu":
            raise ValueError(
                f"a quorum needs messages that are matched by number, which NCCL does not have: leave out {self.quorum=}"
            )
        gathered = [exchange for exchange in exchanges if isinstance(exchange, GatheredMean)]
        parts = [kind_of(bucket).part for bucket in self.flat.buckets]
        self._merges = QuorumMerges(mailbox, self.quorum, self.grace, gathered, parts)
        self._merges.courier.end_with(self)
        self._merges.courier.start()

    def post(self, bucket: Bucket, turn: int) -> None:
        """Posts this rank's pseudo-gradients of a round, with the last bucket of the round."""
        assert self._merges is not None
        if bucket is self.buckets_of(turn)[-1]:
            self._merges.post(kind_of(bucket).part, self._weight())

    def merged(self, bucket: Bucket) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the number of the round, and the mean, of each merge since the last round of a bucket."""
        return self._means_of(bucket, self._merged[kind_of(bucket).part])

    def _means_of(self, bucket: Bucket, merged: Sequence[Merged]) -> Iterator[tuple[int, torch.Tensor]]:
        for each in merged:
            yield each.number * self.fragments + kind_of(bucket).part, each.means[bucket.index]

    def _weight(self) -> float:
        steps = float(self._steps + 1 - self._posted_at)
        self._posted_at = self._steps + 1
        samples = self._samples or steps
        return samples * samples / steps if self.weighs else 1.0

    def _take_steps(self, steps: int) -> None:
        """See `Algorithm._take_steps`."""
        super()._take_steps(steps)
        self._posted_at = next((step + 1 for step in range(steps - 1, -1, -1) if self.turn_at(step) is not None), 0)

    def wait(self) -> None:
        """See `ModelAlgorithm.wait`."""
        if self._under_way and self._merges is not None:
            self._check_failure()
            begin = time.perf_counter()
            with self._failing():
                for part in {kind_of(bucket).part for bucket in self.buckets_of(self._turn)}:
                    self._merged[part] = self._merges.wait(part)
            self._wait_seconds += time.perf_counter() - begin
        super().wait()

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Uses merges since this rank's last round: parameters move as `start` does, and no local step is lost."""
        assert self._merges is not None
        found = {part: self._merges.new(part) for part in self._merges.parts}
        for bucket in self.flat.buckets:
            if merged := found[kind_of(bucket).part]:
                start = self.start(bucket)
                before = start.to(bucket.flat.dtype).to(start.dtype, copy=True)
                for number, mean in self._means_of(bucket, merged):
                    self.outer_step(bucket, start, mean, number)
                elementwise.apply(REBASED, [bucket.flat, start, before], [])

    def _in_place(self, call: str) -> bool:
        """See `ModelAlgorithm._in_place`; with a quorum, waits until all ranks that are left have come here."""
        several = super()._in_place(call)
        if several and self._merges is not None:
            with self._failing():
                self._left = self._merges.rest(self._catch_up, last=call == "close()")
            self.mark()
            gone = sorted({*range(self._communicator.size)} - {*self._left})
            if gone and (call == "consensus()" or (call == "synchronize()" and self.average_states)):
                raise RankLostError(
                    f"{call} needs all ranks, of which {gone} are lost: leave out average_states=True, or take averaged()",
                    gone,
                )
        return several

    def mean_of_ranks(self, vector: torch.Tensor) -> None:
        """See `ModelAlgorithm.mean_of_ranks`: over those that are left."""
        if self._merges is None or len(self._left) == self._communicator.size:
            super().mean_of_ranks(vector)
            return
        # Communicators of all ranks have failed.
        self._means += 1
        group_mean(self.mailbox, self._left, vector, _MEANS + 2 * self._means)

    def give_first(self, data: torch.Tensor) -> None:
        """See `ModelAlgorithm.give_first`: the first of those that are left."""
        if self._merges is None or len(self._left) == self._communicator.size:
            super().give_first(data)
            return
        # Only means are at hand. Those of bytes and zeros, times the number of ranks, are whole numbers again but for rounding.
        values = (
            data.double() if self._communicator.rank == min(self._left) else torch.zeros_like(data, dtype=torch.float64)
        )
        self.mean_of_ranks(values)
        data.copy_(values.mul_(len(self._left)).round_())

    @property
    def follows_letters(self) -> bool:
        """See `RoundAlgorithm.follows_letters`; the letters of a quorum are others."""
        return self.quorum is None

    @contextlib.contextmanager
    def join(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """See `RoundAlgorithm.join`; with a quorum ranks may have different numbers of batches anyway."""
        if self.quorum is None:
            with super().join(optimizer):
                yield
        else:
            yield

    def close(self) -> None:
        """See `Algorithm.close`; with a quorum, waits until all ranks that are left have come here."""
        if self._merges is not None and not self._closed and self._failure is None:
            self._in_place("close()")
            if len(self._left) < self._communicator.size:
                for each in self._communicators():
                    each.abort("other ranks were lost")  # which do not come to a farewell
        super().close()

    def _stop(self) -> None:
        """See `Algorithm._stop`."""
        super()._stop()
        if self._merges is not None:
            self._merges.courier.end(f"{type(self).__name__} was closed")

    def numbers(self) -> dict[str, float]:
        """See `ModelAlgorithm.numbers`: with those of merges."""
        return super().numbers() | ({} if self._merges is None else self._merges.numbers())

    def load_quorum(self, numbers: Mapping[str, float]) -> None:
        """Restores the numbers of merges, also on another number of ranks."""
        if self._merges is not None:
            self._merges.load(numbers)
