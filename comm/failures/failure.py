"""How an operation failed: at which rank, as a transport knows it; who was at fault; and the error to raise."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError, LinkError, MismatchError, RankLostError

MATCH = (
    "all ranks must issue the same operations with the same sizes in the same order (if ranks have different numbers of "
    "batches, use `model.join()`)"
)
Kind = Literal["lost", "closed", "late", "mismatch", "link", "stalled", "unknown"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True)
class Diagnosis:
    """Who was at fault.

    Attributes:
        kind: "lost" (died or unreachable), "closed" (left this communicator), "late" (alive, but not in the operation),
            "mismatch" (called another operation). "link": the connection between two ranks broke, both are alive.
            "stalled": nothing comes through it. Else "unknown".
        ranks: the ranks at fault, as numbers of the world.
        text: how it showed.
        communicator: the name of the communicator whose operation failed.
        by: the rank that found out.
    """

    kind: Kind
    ranks: tuple[int, ...]
    text: str
    communicator: str
    by: int

    def concerns(self, communicator: str, members: Sequence[int]) -> bool:
        """Returns True if it explains a failure of a communicator of these ranks."""
        return bool(set(self.ranks) & set(members)) if self.kind == "lost" else self.communicator == communicator


def different_calls(calls: Mapping[int, str]) -> str:
    """Returns in which methods ranks are, to go behind a sentence; empty if these are the same, or one is not known."""
    if len(set(calls.values())) < 2 or not all(calls.values()):
        return ""
    return "; " + ", ".join(f"rank {rank} is in {call}" for rank, call in calls.items())


class PeerError(ConnectionError):
    """Something went wrong with one other rank.

    Attributes:
        peer: which one.
    """

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class MismatchPeerError(PeerError):
    """Another rank's call does not fit this one's.

    Attributes:
        theirs: what the other rank did.
        ours: what this rank did.
    """

    def __init__(self, peer: int, theirs: str, ours: str) -> None:
        super().__init__(peer, f"rank {peer} {theirs} where this rank {ours}: {MATCH}")
        self.theirs = theirs
        self.ours = ours


@dataclass(frozen=True)
class Failure:
    """How an operation failed, as this rank saw it.

    Attributes:
        where: the operation and its communicator.
        members: the communicator's ranks as numbers of the world.
        me: this rank, as a number of the world.
        timeout: seconds that the operation was given.
        peer: the rank of the communicator at which it went wrong; None if the transport does not know.
        timed_out: True if the time ran out, False if a connection broke.
        cause: what the transport said, in brackets; may be empty.
    """

    where: str
    members: Sequence[int]
    me: int
    timeout: float
    peer: int | None
    timed_out: bool
    cause: str

    def error(self, diagnosis: Diagnosis | None) -> CommunicationError:
        """Returns the error to raise, with the ranks at fault as numbers of the communicator."""
        where, said, peer = self.where, self.cause, self.peer
        ranks = [self.members.index(rank) for rank in diagnosis.ranks if rank in self.members] if diagnosis else []
        numbers = ", ".join(map(str, ranks))
        many = "ranks" if len(ranks) > 1 else "rank"
        if diagnosis is None or diagnosis.kind == "unknown":
            detail = diagnosis.text if diagnosis else "the ranks send no heartbeats, so the rank at fault is not known"
            if self.timed_out:
                text = (
                    f"{where} did not finish within {self.timeout:g} s: {detail}; raise timeout= to wait longer{said}"
                )
                return CollectiveTimeoutError(text, [] if peer is None else [peer])
            if peer is not None:
                return RankLostError(f"{where} failed at rank {peer}: {detail}{said}", [peer])
            return CommunicationError(f"{where} failed: {detail}{said}")
        reporter = f" (reported by world rank {diagnosis.by})" if diagnosis.by != self.me else ""
        if diagnosis.kind == "mismatch":
            return MismatchError(f"{where} failed{reporter}: {diagnosis.text}: {MATCH}", ranks)
        if diagnosis.kind == "link":
            return LinkError(
                f"{where} failed{reporter}: {diagnosis.text}; look at the network between their hosts{said}", ranks
            )
        if diagnosis.kind == "stalled":
            text = f"{where} cannot finish{reporter}: {diagnosis.text}; look at the network between their hosts, or"
            return CollectiveTimeoutError(f"{text} raise timeout={said}", ranks)
        if self.me in diagnosis.ranks:
            text = f"{where} failed, for the others have given up this rank{reporter}: {diagnosis.text}{said}"
            return with_ranks(CollectiveTimeoutError if diagnosis.kind == "late" else RankLostError, text, ranks)
        if diagnosis.kind == "late":
            how = (
                f"did not finish within {self.timeout:g} s, waiting for" if self.timed_out else "cannot finish without"
            )
            return CollectiveTimeoutError(
                f"{where} {how} {many} {numbers}{reporter}: {diagnosis.text}; make all ranks issue the same operations in "
                f"the same order (if ranks have different numbers of batches, use `model.join()`), or raise timeout={said}",
                ranks,
            )
        how = "left" if diagnosis.kind == "closed" else "was lost"
        return RankLostError(f"{many} {numbers} {how} during {where}{reporter}: {diagnosis.text}{said}", ranks)


def is_timeout(error: RuntimeError) -> bool:
    """Returns True if a transport's error is about a timeout."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def cause_text(error: Exception) -> str:
    """Returns the telling part of Gloo's message: neither where in its source it arose nor its good wishes."""
    lines = str(error).splitlines()
    text = lines[0] if lines else type(error).__name__
    return re.sub(r"^\[\S+:\d+\] ", "", text).split(" This is typically")[0]


def with_ranks(kind: type[CommunicationError], text: str, ranks: Any) -> CommunicationError:
    """Returns an error of a kind, with its ranks where the kind has any."""
    if issubclass(kind, (RankLostError, CollectiveTimeoutError, MismatchError, LinkError)):
        return kind(text, ranks)
    return kind(text)
