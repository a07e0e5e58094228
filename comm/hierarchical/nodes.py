"""Which ranks share a host."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bagua_kernels import knobs
from bagua_kernels.comm.communicator import Communicator, gather_json
from bagua_kernels.comm.joining.evidence import boot_id, text_of


@dataclass(frozen=True)
class Place:
    """Where one process runs.

    Attributes:
        source: what named the node: a variable of the environment, or "the host".
        node: the name; processes with equal names share a node.
        room: the most processes that the node can have, None where that is not known.
    """

    source: str
    node: str
    room: int | None = None

    @classmethod
    def here(cls) -> Place:
        """Returns what this process knows: BAGUA_KERNELS_NODE, else GROUP_RANK, else NODE_RANK, else its host.

        Hosts are distinguished by boot and network namespace: containers with a network each count as nodes, and so do two
        machines of one name.

        Raises:
            ValueError: if a variable holds no whole number.
        """
        if name := knobs.NODE.get():
            return cls(knobs.NODE.variable, name)
        for knob in (knobs.GROUP_RANK, knobs.NODE_RANK):
            number = knob.get()
            if number is not None:
                return cls(knob.variable, str(number), knobs.LOCAL_WORLD_SIZE.get())
        return cls("the host", _host())


@dataclass(frozen=True)
class Nodes:
    """The ranks of a communicator, node by node.

    Attributes:
        members: for each node its ranks, ascending; nodes are in the order of their first ranks.
    """

    members: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.members for rank in node)
        if ranks != list(range(len(ranks))) or not all(self.members):
            raise ValueError(
                f"expected every rank from 0 upwards on exactly one node, and no empty node, got {self._lists()}"
                f"{_faults(ranks)}"
            )
        if self.members != tuple(sorted(tuple(sorted(node)) for node in self.members)):
            raise ValueError(f"expected ascending ranks and nodes, got {self._lists()}: use Nodes.given")

    @classmethod
    def given(cls, nodes: Iterable[Iterable[int]]) -> Nodes:
        """Takes the nodes as lists of ranks, in any order, such as `[[0, 1], [2, 3, 4]]`.

        Raises:
            TypeError: if a rank is no int.
            ValueError: if a rank is missing or named twice, or if a node is empty.
        """
        lists = [list(node) for node in nodes]
        for rank in (rank for node in lists for rank in node):
            if not isinstance(rank, int) or isinstance(rank, bool):
                raise TypeError(f"expected ranks to be ints, got {rank!r} in {lists}")
        return cls(tuple(sorted(tuple(sorted(node)) for node in lists)))

    @classmethod
    def find(cls, communicator: Communicator, place: Place | None = None) -> Nodes:
        """Finds the nodes of a communicator's ranks; every rank calls it.

        1. Each rank finds the place where it runs.
        2. All-gather of these places.
        3. Ranks with one name share a node; the same data, and so the same result or error, on every rank.

        Args:
            communicator: the ranks.
            place: where this rank runs, if the caller knows better than `Place.here`.

        Raises:
            ValueError: a variable is invalid on some rank, ranks use different sources of names, or a node has more than
                LOCAL_WORLD_SIZE ranks. It is raised on every rank and names the ranks at fault.
            CommunicationError: a rank was lost or did not take part in time.
        """
        problem = ""
        try:
            place = place or Place.here()
        except ValueError as error:
            problem = str(error)
        known = [] if place is None else [place.source, place.node, place.room]
        texts = _exchange(communicator, "look for their nodes", [known, problem])
        problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(texts) if text]
        if problems:
            raise ValueError(f"the nodes cannot be found: {'; '.join(problems)}")
        told = [Place(*place) for place, _ in texts]
        sources = _alike(place.source for place in told)
        if len(sources) > 1:
            said = ", ".join(f"ranks {ranks} by {source}" for source, ranks in sources.items())
            raise ValueError(f"ranks name their nodes in different ways, {said}: set the same variable on all ranks")
        nodes = _alike(place.node for place in told)
        for name, ranks in nodes.items():
            room = min((room for room in (told[rank].room for rank in ranks) if room), default=len(ranks))
            if len(ranks) > room:
                raise ValueError(
                    f"ranks {ranks} all have {told[ranks[0]].source}={name}, but LOCAL_WORLD_SIZE={room}: give each "
                    f"node a number of its own, or name them by {knobs.NODE.variable}"
                )
        return cls.given(nodes.values())

    def agree(self, communicator: Communicator) -> Nodes:
        """Checks that all ranks of a communicator hold these nodes, and that they are its ranks; every rank calls it.

        Returns:
            The nodes themselves.

        Raises:
            ValueError: on every rank, naming those that disagree.
            CommunicationError: a rank was lost or did not take part in time.
        """
        check_agreement(communicator, "nodes", str(self._lists()))
        if self.size != communicator.size:
            raise ValueError(
                f"expected the nodes of {communicator.size} ranks, got those of {self.size}: {self._lists()}; name the "
                "ranks of the communicator, each once"
            )
        return self

    @property
    def size(self) -> int:
        """The number of ranks on all nodes."""
        return sum(map(len, self.members))

    @property
    def largest(self) -> int:
        """The number of ranks of the largest node."""
        return max(map(len, self.members), default=0)

    @property
    def even(self) -> bool:
        """True if all nodes have as many ranks."""
        return len({len(node) for node in self.members}) <= 1

    def node_of(self, rank: int) -> int:
        """Returns the number of the node that has a rank."""
        return next(number for number, node in enumerate(self.members) if rank in node)

    def cut(self, n: int, align: int, pieces: int) -> list[list[slice]]:
        """Cuts a vector into pieces, and each piece into shards, as many as the largest node has ranks.

        Args:
            n: elements of the vector.
            align: elements at whose multiples shards begin and end; only the end of the vector may fall short.
            pieces: number of pieces; fewer where the vector is too short for them.

        Returns:
            At least one piece, each a list of shards, in order and without gaps; shards of a piece are equally long.
        """
        shards = self.largest
        unit = shards * align
        units = -(-n // unit)
        pieces = max(1, min(pieces, units))
        bounds = [units * i // pieces * unit for i in range(pieces + 1)]
        starts = [[min(a + (b - a) // shards * s, n) for s in range(shards + 1)] for a, b in pairwise(bounds)]
        return [[slice(begin, end) for begin, end in pairwise(piece)] for piece in starts]

    def owners(self, shard: int) -> list[int]:
        """Returns the ranks that own part number `shard` of a vector, one per node: local rank `shard` mod L of L."""
        return [node[shard % len(node)] for node in self.members]

    def _lists(self) -> list[list[int]]:
        return [list(node) for node in self.members]


def check_agreement(communicator: Communicator, what: str, text: str) -> None:
    """Checks that all ranks hold the same text; every rank calls it.

    Args:
        communicator: the ranks.
        what: what the text is about, for the error.
        text: of any length: only a hash of it is sent.

    Raises:
        ValueError: on every rank, naming the ranks that are not of the majority's opinion.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()
    held = _alike(_exchange(communicator, f"are given {what}", digest))
    if len(held) > 1:
        usual, others = _majority(held)
        raise ValueError(
            f"ranks {others} were given other {what} than ranks {usual}: give all ranks the same; this rank, "
            f"{communicator.rank}, has {text}"
        )


def _exchange(communicator: Communicator, doing: str, value: Any) -> list[Any]:
    """Returns the values of all ranks, as JSON makes them, once it is sure that all ranks do the same."""
    told = gather_json(communicator, [doing, value])
    held = _alike(what for what, _ in told)
    if len(held) > 1:
        usual, others = _majority(held)
        raise ValueError(
            f"ranks {others} {' or '.join(sorted({told[rank][0] for rank in others}))} where ranks {usual} "
            f"{told[usual[0]][0]}: do the same on all ranks"
        )
    return [value for _, value in told]


def _alike(values: Iterable[Hashable]) -> dict[Any, list[int]]:
    """Returns for each value the ranks that hold it, in the order of the first of them."""
    held: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        held.setdefault(value, []).append(rank)
    return held


def _majority(held: dict[Any, list[int]]) -> tuple[list[int], list[int]]:
    """Returns the ranks that hold the most frequent value, of several the one of the lowest rank, and all others."""
    usual = max(held.values(), key=len)
    return usual, sorted(rank for ranks in held.values() if ranks is not usual for rank in ranks)


def _faults(ranks: Sequence[int]) -> str:
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    missing = sorted(set(range(max(ranks, default=-1) + 1)) - set(ranks))
    return (f"; twice: {twice}" if twice else "") + (f"; missing: {missing}" if missing else "")


def _host() -> str:
    """Returns a text that is equal on two processes exactly if they share a kernel and a network, whatever the host's name is."""
    boot = boot_id() or f"{text_of('/etc/machine-id')} {socket.gethostname()}"
    try:
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        network = ""
    return f"{boot} {network}"
