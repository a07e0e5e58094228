"""Who averages with whom in each version of a triggered average: partitions of the ranks that change from version to version."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from bagua_kernels.comm.communicator import Communicator

_SAMPLE = 64  # versions whose groups are compared at the start


@dataclass(frozen=True)
class Groups(abc.ABC):
    """A partition of `size` ranks for every version; equal ones compare and hash equal."""

    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise ValueError(f"expected size to be a number of ranks, an int >= 1, got {self.size!r}")

    @abc.abstractmethod
    def partition(self, version: int) -> Sequence[tuple[int, ...]]:
        """Returns the groups of a version, each in ascending order; every rank is in one of them."""

    def of(self, version: int, rank: int) -> tuple[int, ...]:
        """Returns the members of a rank's group in a version, in ascending order."""
        return next(group for group in self.partition(version) if rank in group)

    def digest(self) -> str:
        """Returns the SHA-256 of the text and of the groups of the first 64 versions, in hexadecimal."""
        groups = [tuple(self.partition(version)) for version in range(_SAMPLE)]
        return hashlib.sha256(f"{self!r} {groups}".encode()).hexdigest()

    def check(self, communicator: Communicator) -> None:
        """Verifies that all ranks hold these groups; every rank calls it, before training.

        Raises:
            ValueError: on every rank, if groups differ between ranks, or the size is not the communicator's.
        """
        found = communicator.all_gather_object((repr(self), self.digest(), self.size))
        different = [rank for rank, each in enumerate(found) if each != found[0]]
        if different:
            texts = "; ".join(f"rank {rank} holds {found[rank][0]}" for rank in (0, *different))
            raise ValueError(f"ranks {different} hold other groups than rank 0: pass the same to every rank; {texts}")
        if self.size != communicator.size:
            raise ValueError(f"the groups are for {self.size} ranks: expected some for {communicator.size}")


@dataclass(frozen=True)
class Whole(Groups):
    """All ranks in one group."""

    def partition(self, version: int) -> Sequence[tuple[int, ...]]:
        """See `Groups.partition`."""
        return [tuple(range(self.size))]


@dataclass(frozen=True)
class OfNodes(Groups):
    """Groups of whole nodes, which another partition divides.

    Attributes:
        inner: the groups of nodes, by their numbers.
        nodes: the ranks of each node.
    """

    inner: Groups = Whole(1)
    nodes: tuple[tuple[int, ...], ...] = ((0,),)

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = sum(map(len, self.nodes))
        if self.inner.size != len(self.nodes) or self.size != ranks:
            raise ValueError(
                f"expected groups of {len(self.nodes)} nodes with {self.size} ranks, got those of {self.inner.size} nodes with "
                f"{ranks} ranks"
            )

    def partition(self, version: int) -> Sequence[tuple[int, ...]]:
        """See `Groups.partition`."""
        groups = self.inner.partition(version)
        return [tuple(sorted(rank for node in group for rank in self.nodes[node])) for group in groups]


@dataclass(frozen=True)
class Butterfly(Groups):
    """Groups of `group` ranks whose numbers differ in some bits; the next version takes the next bits (WAGMA-SGD, section IV.B).

    After ceil(log2 P / log2 S) versions without training in between, all ranks have the mean of all P ranks. Bits are counted
    anew in each version; the paper's algorithm 1 shifts them cumulatively, which does not give the paper's own example.
    """

    group: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, number in (("size", self.size), ("group", self.group)):
            if number < 1 or number & (number - 1):
                raise ValueError(f"expected {name} to be a power of two, got {number}: Shuffled takes any number")
        if not 1 < self.group <= self.size:
            raise ValueError(f"expected group to be from 2 to {self.size}, got {self.group}")

    def partition(self, version: int) -> Sequence[tuple[int, ...]]:
        """See `Groups.partition`."""
        bits, taken = self.size.bit_length() - 1, self.group.bit_length() - 1
        mask = sum(1 << (version * taken + place) % bits for place in range(taken))
        labels: dict[int, list[int]] = {}
        for rank in range(self.size):
            labels.setdefault(rank & ~mask, []).append(rank)
        return [tuple(group) for group in labels.values()]


@dataclass(frozen=True)
class Shuffled(Groups):
    """Groups of `group` ranks or a few more, drawn anew in each version from a shared seed; for any number of ranks.

    There are floor(P / S) groups, whose sizes differ by at most one. So none has fewer than S ranks.
    """

    group: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 < self.group <= max(self.size, 2):
            raise ValueError(f"expected group to be from 2 to {self.size}, got {self.group}")

    def partition(self, version: int) -> Sequence[tuple[int, ...]]:
        """See `Groups.partition`."""

        def draw(rank: int) -> bytes:
            return hashlib.sha256(f"{self.seed} {version} {rank}".encode()).digest()

        order = sorted(range(self.size), key=draw)
        count = max(1, self.size // self.group)
        return [tuple(sorted(order[first::count])) for first in range(count)]
