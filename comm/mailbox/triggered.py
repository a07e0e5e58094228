"""Averages over groups of ranks that any member starts, and in which late ranks take part without their training thread."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from bagua_kernels.comm.mailbox.courier import Courier
from bagua_kernels.comm.mailbox.group_mean import NUMBERS, group_mean, mean_by_nodes
from bagua_kernels.comm.mailbox.groups import Groups
from bagua_kernels.comm.mailbox.rests import Rests

_ACT = 0  # kind of letters
_PIECE = 1 << 22  # elements of which the mean is taken at a time: rows of all members take as much memory again
_ACT_BODY = struct.Struct("<q")

# Replaces a vector by its mean over some ranks: (members, number of the bucket, vector, number of the first exchange).
GroupMean = Callable[[Sequence[int], int, torch.Tensor, int], None]


@dataclass(frozen=True)
class Execution:
    """One version as it was executed on a rank.

    Attributes:
        version: its number.
        members: of the group.
        contributed: the version of the model that this rank contributed.
        fresh: True if the mean replaces this rank's model.
    """

    version: int
    members: tuple[int, ...]
    contributed: int
    fresh: bool

    @property
    def staleness(self) -> int:
        """By how many versions what was contributed was older."""
        return max(0, self.version - self.contributed)


class Publisher(Protocol):
    """A model that is read and changed beside its training."""

    def read(self, out: Sequence[torch.Tensor]) -> tuple[int, bool]:
        """Copies the model and what is owed to it, never in the middle of a step.

        Returns:
            The version of the model, and whether it was at rest.
        """

    def rest(self, resting: bool) -> None:
        """Sets whether training leaves the model as it is; called on the training thread."""

    def receive(self, execution: Execution, read: Sequence[torch.Tensor], mean: list[torch.Tensor]) -> None:
        """Keeps what is owed beside the model: a replacement if fresh, else `mean - read`; `read` counts it in.

        The memory of `mean`, which came from `buffers`, is the model's from then on.
        """

    def buffers(self) -> list[torch.Tensor]:
        """Returns memory like the model's, a flat vector per bucket, with anything in it."""


class TriggeredAverage:
    """Averages over groups that any member starts and in which late members take part (WAGMA-SGD, section IV).

    A version is a number from 0. For each, the ranks are divided into groups. All ranks execute all versions that concern them,
    each once and in order.

    1. The first rank of a group whose model is that of version v sends letters to the others, along a binomial tree. Each passes
       them on once, before it takes part.
    2. Each of them executes the versions before v that it still owes, with their groups.
    3. Each reads its model, of whatever version, and the group has the mean.
    4. A member whose model was that of v when it was read takes the mean for its model. Another one is owed mean - read.

    With a period, version v synchronises if v + 1 is a multiple of it. All ranks are its group, and each waits for its training
    thread to come to v.

    A rest may leave out the buckets of a version that are not exchanged yet (`rest(early=True)`). With each bucket the members of
    a group exchange whether they are in such a rest. Where all are, the version ends behind that bucket on all of them, and none
    takes anything of it.

    Attributes:
        next: the version that this rank executes next.
    """

    def __init__(
        self,
        courier: Courier,
        groups: Groups,
        period: int | None,
        model: Publisher,
        *,
        activate: Literal["group", "all"] = "group",
        replaces: bool = True,
        group_mean: GroupMean | None = None,
        nodes: Sequence[Sequence[int]] | None = None,
        on_execution: Callable[[Execution], None] | None = None,
        ends_early: bool = False,
    ) -> None:
        """Gives a courier, which is not started yet, its work.

        Args:
            courier: of this rank, for this average alone.
            groups: the same on all ranks, see `Groups.check`.
            period: the number of versions of which the last one synchronises; None for never.
            model: of this rank.
            activate: who gets letters of the first rank: its group, or all ranks as in the paper, which then execute the
                version in their own groups.
            replaces: False if every rank is owed mean - read, as if it were late in each version.
            group_mean: takes the mean of one bucket; by default the function of this name.
            nodes: the ranks of each node, as many on all, where groups consist of whole nodes: these take their means first.
            on_execution: called on the courier's thread after each version.
            ends_early: True if `rest(early=True)` is to have an effect; the same on all ranks.
        """
        if period is not None and period < 1:
            raise ValueError(f"expected period to be at least 1, or None, got {period}")
        self._courier, self._mailbox, self._groups = courier, courier.mailbox, groups
        self._period, self._model, self._activate, self._replaces = period, model, activate, replaces
        self._group_mean = group_mean or self._plain_mean
        self._nodes = nodes
        self._on_execution = on_execution
        self._ends_early, self._early = ends_early, False
        self._everyone = tuple(range(self._mailbox.size))
        self.next = 0
        self._arrived = self._told = -1
        self._passed_on: set[int] = set()
        self._rests = Rests(courier)
        self._read: list[torch.Tensor] = []
        courier.on(_ACT, self._hear_act)
        courier.work(self._execute_next)

    def synchronises(self, version: int) -> bool:
        """Returns True if all ranks average in a version, each when its training thread has come there."""
        return self._period is not None and (version + 1) % self._period == 0

    def members(self, version: int) -> tuple[int, ...]:
        """Returns with whom this rank averages in a version."""
        return self._everyone if self.synchronises(version) else self._groups.of(version, self._mailbox.rank)

    @property
    def arrived(self) -> int:
        """The version of this rank's model; -1 before the first."""
        return self._arrived

    def arrive(self, version: int) -> None:
        """Sets the version of this rank's model, and starts that version if no other rank has."""
        self._courier.check()
        with self._courier.changed:
            if version <= self._arrived:
                raise ValueError(
                    f"expected a version above {self._arrived}, at which this rank has arrived, got {version}"
                )
            self._arrived = version
        self._courier.wake()

    def start(self) -> None:
        """Starts the next version of this rank's group, whatever the version of its model; not at rest."""
        with self._courier.changed:
            # After this rank's REST nobody would expect another version of it.
            if not self._rests.resting:
                self._told = max(self._told, self.next)
        self._courier.wake()

    def wait(self, version: int) -> None:
        """Waits until a version is through on this rank."""
        self._courier.wait_for(lambda: self.next > version)

    @property
    def idle(self) -> bool:
        """True if every version that this rank knows of is through here."""
        with self._courier.changed:
            return self.next > max(self._arrived, self._told)

    @property
    def rests(self) -> bool:
        """True from `rest` to `resume`."""
        return self._rests.resting

    @property
    def rest_number(self) -> int:
        """The number of this rank's present or next rest, from 0."""
        return self._rests.number

    def rest(self, *, early: bool = False) -> int:
        """Takes part in whatever others start, until all ranks rest; returns the last version, which is then through everywhere.

        Nothing is executed afterwards until `resume`.

        Args:
            early: True to leave out buckets that are not exchanged yet, once all members of a group pass it. It is for calls that
                take the mean of all ranks next, which these buckets do not change.

        Raises:
            RankLostError: a rank is lost that did not rest.
        """
        self._courier.check()
        self._early = early
        self._model.rest(True)
        self._rests.begin()
        with self._courier.changed:
            last = max(self._arrived, self._told if not self._replaces else -1)
        self._rests.tell(last)
        self._rests.wait()
        return self.next - 1

    def resume(self) -> None:
        """Ends a rest, when the model is what others may read again."""
        self._early = False
        self._model.rest(False)
        with self._courier.changed:
            self._rests.resume()
            self._arrived = max(self._arrived, self.next - 1)
        self._courier.wake()

    def _hear_act(self, sender: int, body: bytes) -> None:
        (version,) = _ACT_BODY.unpack(body)
        with self._courier.changed:
            self._told = max(self._told, version)
        self._pass_on(version, sender)

    def _pass_on(self, version: int, sender: int | None = None) -> None:
        """Sends letters to the other neighbours in the tree of a version, once.

        Versions that are finished here were passed on already.
        """
        if version < self.next or version in self._passed_on:
            return
        self._passed_on.add(version)
        reached = self._everyone if self._activate == "all" else self.members(version)
        for peer in neighbours(reached, self._mailbox.rank, version):
            if peer != sender:
                self._courier.post(peer, _ACT, _ACT_BODY.pack(version))

    def _execute_next(self) -> bool:
        """Executes the next version if a rank has started it or a later one; returns False if there is none."""
        version, rests = self.next, self._rests
        with self._courier.changed:
            target = max(self._arrived, self._told)
            if (lasts := rests.everyone()) is not None:
                target = max(lasts)
                rests.held = version > target
            if version > target or (self.synchronises(version) and self._arrived < version and not rests.resting):
                return False
        members = self.members(version)
        # Before this rank waits for others, for some may hear of the version from no other rank.
        self._pass_on(version)
        with torch.profiler.record_function(self._courier.label):
            execution = self._contribute(version, members)
        self._passed_on = {each for each in self._passed_on if each > version}
        if self._on_execution is not None:
            self._on_execution(execution)
        with self._courier.changed:
            self.next = version + 1
        return True

    def _contribute(self, version: int, members: tuple[int, ...]) -> Execution:
        self._read = self._read or self._model.buffers()
        means = self._model.buffers()
        contributed, resting = self._model.read(self._read)
        # Decided when the model was read: if this rank arrives before the end, the mean lacks its last step.
        fresh = resting or (self._replaces and contributed == version)
        whole = self._group_mean != self._plain_mean  # other means know each bucket as one vector
        pieces = [
            (index, piece)
            for index, mean in enumerate(means)
            for piece in ([mean] if whole else mean.split(_PIECE) or [mean])
        ]
        for read, mean in zip(self._read, means, strict=True):
            mean.copy_(read)
        execution = Execution(version, members, contributed, fresh)
        for place, (index, piece) in enumerate(pieces):
            number = (NUMBERS + 1) * (version * len(pieces) + place)
            is_last = place + 1 == len(pieces)
            ends = self._ask_for_end(members, number + NUMBERS) if self._ends_early and not is_last else None
            self._group_mean(members, index, piece, number)
            if ends is not None and ends():
                # The mean of all ranks follows, and no member makes anything of this one.
                return execution
        self._model.receive(execution, self._read, means)
        return execution

    def _ask_for_end(self, members: Sequence[int], number: int) -> Callable[[], bool]:
        """Exchanges with a group whether this rank is in an early rest; returns what waits, and returns True if all are."""
        device, early = self._mailbox.device, self._early
        others = [peer for peer in members if peer != self._mailbox.rank]
        flags = torch.empty(len(others), 1, dtype=torch.uint8, device=device)
        own = torch.full((1,), early, dtype=torch.uint8, device=device)
        work = self._mailbox.exchange(dict(zip(others, flags, strict=True)), dict.fromkeys(others, own), number)

        def ends() -> bool:
            work.wait()
            # waits: on the courier's thread, and only in an early rest.
            return early and bool(flags.all())

        return ends

    def _plain_mean(self, members: Sequence[int], index: int, vector: torch.Tensor, number: int) -> None:
        if self._nodes is None:
            group_mean(self._mailbox, members, vector, number)
        else:
            mean_by_nodes(self._mailbox, [node for node in self._nodes if node[0] in members], vector, number)


def neighbours(members: Sequence[int], rank: int, version: int) -> list[int]:
    """Returns the neighbours of a rank in a binomial tree over some ranks; for any number of ranks.

    The tree of a version has one root, the same on all ranks, whichever rank begins. Trees from each rank that begins would not
    do: a rank that takes part already reads no letters of the second one, and cannot pass them on.

    Args:
        members: the ranks, each at its position.
        rank: one of them.
        version: which decides the root.
    """
    count = len(members)
    root = version % count
    place = (members.index(rank) - root) % count
    found = [place - (1 << place.bit_length() - 1)] if place else []
    found += [place + (1 << bit) for bit in range(count.bit_length()) if place < 1 << bit < count - place]
    return [members[(root + each) % count] for each in found]
