"""Rounds of local steps for which some of the ranks are enough."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from bagua_kernels.algorithms.exchanges.gathered import GatheredMean
from bagua_kernels.algorithms.local_steps.outer_round import OuterRound
from bagua_kernels.algorithms.local_steps.quorum_merges import Means, QuorumMerges
from bagua_kernels.algorithms.models.catch_up import CatchUp, Participant
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.plan import Plan
from bagua_kernels.comm import Work
from bagua_kernels.comm.mailbox.group_mean import group_mean
from bagua_kernels.errors import RankLostError

_MEANS = 1 << 62  # numbers of exchanges from here on are those of means at a rest


@dataclass
class _Part:
    """A part of the model, which is merged by itself.

    Attributes:
        rounds: of its buckets.
        merged: the means since its last round.
    """

    rounds: list[OuterRound] = field(default_factory=list)
    merged: list[Means] = field(default_factory=list)


class Quorum:
    """Posts pseudo-gradients to all other ranks, and takes outer steps by the means of what a quorum has posted.

    Attributes:
        samples: of this rank in the round under way, as far as they were counted.
        merges: of what ranks have posted.
        needs_all: calls for which all ranks are needed.
    """

    def __init__(self, local: LocalModel, count: int, grace: float, weighs: bool, needs_all: frozenset[str]) -> None:
        """Begins without buckets; see `open`.

        Args:
            local: this rank's model.
            count: ranks that are enough for a mean.
            grace: seconds for which a mean waits for further ranks.
            weighs: False if all ranks have the same weight, whatever their numbers of samples.
            needs_all: calls for which all ranks are needed.

        Raises:
            ValueError: there are fewer ranks, or they are on GPUs.
        """
        if count > local.mailbox.size:
            raise ValueError(f"quorum must be at most the number of ranks, {local.mailbox.size}, got {count}")
        if local.mailbox.device.type != "cpu":
            raise ValueError(
                f"a quorum needs messages that are matched by number, which NCCL does not have: leave out quorum={count}"
            )
        self.samples = 0.0
        self.needs_all = needs_all
        self._local, self._count, self._grace, self._weighs = local, count, grace, weighs
        self._merges: QuorumMerges | None = None
        self._parts: defaultdict[int, _Part] = defaultdict(_Part)
        self._posted_at = 0

    def open(self, rounds: Sequence[OuterRound]) -> QuorumMerges:
        """Makes what merges posts, and returns it; its courier is to be started.

        Args:
            rounds: of all buckets.
        """
        for each in rounds:
            self._parts[each.kind.part].rounds.append(each)
        exchanges = [_gathered(each) for each in rounds]
        numbers = [each.kind.part for each in rounds]
        self._merges = QuorumMerges(self._local.mailbox, self._count, self._grace, exchanges, numbers)
        return self._merges

    @property
    def merges(self) -> QuorumMerges:
        """Of what ranks have posted."""
        assert self._merges is not None
        return self._merges

    def exchange(self, part: OuterRound, number: int) -> Iterator[Work]:
        """See `Collection.exchange`: posts all buckets of a part of the model with its last one."""
        if part is self._parts[part.kind.part].rounds[-1]:
            self.merges.post(part.kind.part, self._weight())
        return iter(())

    def means(self, part: OuterRound) -> Iterable[torch.Tensor]:
        """See `Collection.means`: those of each merge since the last round of the bucket."""
        return self._of(part, self._parts[part.kind.part].merged)

    def wait_for(self, numbers: Iterable[int]) -> None:
        """Waits until there is a mean of each of some parts of the model since its last round."""
        for number in numbers:
            self._parts[number].merged = self.merges.wait(number)

    @torch.no_grad()
    def catch_up(self) -> None:
        """Uses merges since this rank's last round."""
        for number, part in self._parts.items():
            if merged := self.merges.new(number):
                for each in part.rounds:
                    each.catch_up(self._of(each, merged))

    def _of(self, part: OuterRound, merged: Sequence[Means]) -> Iterator[torch.Tensor]:
        return (means[_gathered(part)] for means in merged)

    def _weight(self) -> float:
        steps = float(self._local.steps + 1 - self._posted_at)
        self._posted_at = self._local.steps + 1
        samples = self.samples or steps
        return samples * samples / steps if self._weighs else 1.0

    def take_steps(self, steps: int, plan: Plan) -> None:
        """Goes on with a number of steps."""
        self._posted_at = next((step + 1 for step in range(steps - 1, -1, -1) if plan.round_at(step) is not None), 0)

    def numbers(self) -> dict[str, Any]:
        """Returns what a checkpoint contains of it."""
        return {"quorum": self.merges.numbers()}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Restores what `numbers` returned, also on another number of ranks."""
        self.merges.load(numbers.get("quorum", {}))


def _gathered(part: OuterRound) -> GatheredMean:
    assert part.gathered is not None
    return part.gathered


class QuorumParticipant(Participant, Protocol):
    """The rounds of this rank; see `OuterRounds`."""

    def arrive(self, call: str) -> None: ...  # noqa: D102
    def under_way_parts(self) -> Iterable[OuterRound]: ...  # noqa: D102


class QuorumCatchUp(CatchUp):
    """Waits at calls until all ranks that are left have come there, and have the same outer parameters."""

    def __init__(self, rounds: QuorumParticipant, quorum: Quorum) -> None:
        """Begins with all ranks.

        Args:
            rounds: of this rank.
            quorum: that it serves.
        """
        super().__init__(rounds)
        # A quorum has other letters.
        self._letters = None
        self._participant, self._quorum, self._local = rounds, quorum, rounds.local
        self._left: Sequence[int] = range(rounds.local.mailbox.size)
        self._means = 0

    def begin(self) -> None:
        """See `CatchUp.begin`."""
        self._quorum.merges.courier.start()

    def wait_for_round(self) -> None:
        """See `CatchUp.wait_for_round`."""
        begin = time.perf_counter()
        with self._local.failing():
            self._quorum.wait_for({part.kind.part for part in self._participant.under_way_parts()})
        self._local.wait_seconds += time.perf_counter() - begin

    def arrived(self, call: str) -> None:
        """See `CatchUp.arrived`.

        Raises:
            RankLostError: the call needs all ranks, and some are lost.
        """
        with self._local.failing():
            self._left = self._quorum.merges.rest(self._quorum.catch_up, last=call == "close()")
        self._local.mark()
        gone = sorted({*range(self._local.mailbox.size)} - {*self._left})
        if gone and call in self._quorum.needs_all:
            raise RankLostError(
                f"{call} needs all ranks, of which {gone} are lost: leave out average_states=True, or take averaged()",
                gone,
            )

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """See `CatchUp.join`; ranks may have different numbers of batches anyway."""
        yield

    def finish(self) -> None:
        """See `CatchUp.finish`."""
        self._participant.arrive("close()")
        if len(self._left) < self._local.mailbox.size:
            for each in (self._local.communicator, *self._local.opened):
                each.abort("other ranks were lost")  # which do not come to a farewell

    def mean_of_ranks(self, vector: torch.Tensor) -> bool:
        """See `CatchUp.mean_of_ranks`."""
        if len(self._left) == self._local.mailbox.size:
            return False
        # Communicators of all ranks have failed.
        self._means += 1
        group_mean(self._local.mailbox, self._left, vector, _MEANS + 2 * self._means)
        return True

    def give_first(self, data: torch.Tensor) -> bool:
        """See `CatchUp.give_first`."""
        if len(self._left) == self._local.mailbox.size:
            return False
        # Only means are at hand. Those of bytes and zeros, times the number of ranks, are whole numbers again but for rounding.
        first = self._local.mailbox.rank == min(self._left)
        values = data.double() if first else torch.zeros_like(data, dtype=torch.float64)
        self.mean_of_ranks(values)
        data.copy_(values.mul_(len(self._left)).round_())
        return True

    def close(self) -> None:
        """See `CatchUp.close`."""
        self._quorum.merges.courier.end(f"{self._local.title} was closed")
