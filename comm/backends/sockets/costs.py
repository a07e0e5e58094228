"""What each way of carrying out a collective takes by P, bytes and delay, and the table of ways that follows from that."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from bagua_kernels.comm.backends.sockets.tuning import EVER, WAYS, Limits, Tuning

# Up to so many ranks, and with delays below a millisecond, the default table was measured (bench/results/network.json).
FEW, SHORT = 8, 1e-3
_SIZES = tuple(1 << shift for shift in range(8, 33))  # bytes, at which ways are compared
# Several ranks send to one at the same time: bytes take longer by so much, and more than this is not sent so.
_INCAST = 1.08
# Messages of different rounds cross links that they share; around a ring no two do.
_CROSSING = 1.03
_MARGIN = 1.05  # a way has to be that much faster than the frugal one before it
_WASTEFUL = ("exchange", "doubling", "star", "tree")  # send more bytes than they must


@dataclass(frozen=True)
class Line:
    """How ranks are connected, as far as the choice of ways depends on it.

    Attributes:
        delay: seconds from one rank to another, one way.
        rate: bytes per second that a rank sends, and receives at the same time.
        message: seconds of a rank's processor for a message that it sends and one that it receives.
        header: bytes of a message beyond its contents.
    """

    delay: float
    rate: float
    message: float = 4e-5
    header: int = 110

    @classmethod
    def measured(cls, delay: float) -> Line:
        """Returns the line that has about a measured delay.

        The delay is rounded to a power of ten from 0.1 ms on. So another start takes the same ways, which decide on the
        order of sums. The rate is a guess: 10 Gbit/s below a millisecond, else 100 Mbit/s.
        """
        rounded = 10.0 ** max(-4, round(math.log10(delay))) if delay > 0 else 1e-4
        return cls(rounded, 1.25e9 if rounded < SHORT else 12.5e6)


def rounds(ranks: int) -> int:
    """Returns log2 of the number of ranks, rounded up: messages that wait for one another in a tree."""
    return max(0, (ranks - 1).bit_length())


def delays(operation: str, way: str, ranks: int) -> float:
    """Returns how many one-way delays a collective waits for in sequence."""
    others, log = ranks - 1, rounds(ranks)
    folded = ranks.bit_length() - 1 + (2 if ranks & others else 0)
    if operation == "all_reduce":
        return {"exchange": 1, "doubling": folded, "direct": 2, "halving": 2 * log, "ring": 2 * others}[way]
    if operation == "broadcast":
        return {"star": 1, "tree": log, "direct": 2, "chain": others}[way]
    return {"direct": 1, "rounds": log, "ring": others}[way]


def bytes_sent(operation: str, way: str, ranks: int, nbytes: float) -> float:
    """Returns the bytes that the busiest rank sends, without headers.

    Args:
        operation: the collective.
        way: one of its ways.
        ranks: how many there are.
        nbytes: as in the fields of `Tuning`.
    """
    others, log = ranks - 1, rounds(ranks)
    folded = ranks.bit_length() - 1 + (1 if ranks & others else 0)
    least = 2 * others / ranks
    if operation == "all_reduce":
        factor = {"exchange": others, "doubling": folded, "direct": least, "halving": least, "ring": least}[way]
    elif operation == "broadcast":
        factor = {"star": others, "tree": log, "direct": others / ranks * 2, "chain": 1}[way]
    else:
        factor = 0 if operation == "barrier" else others
    return factor * nbytes


def seconds(operation: str, way: str, ranks: int, nbytes: float, line: Line) -> float:
    """Returns how long a collective takes by one of its ways; see `bytes_sent` for the arguments."""
    if ranks == 1:
        return 0.0
    waits, others = delays(operation, way, ranks), ranks - 1
    at_once = way in ("direct", "exchange", "star")  # messages to all others, each of which costs the processor
    messages = waits * others if at_once else waits
    sent = bytes_sent(operation, way, ranks, nbytes) + messages * line.header
    shared = (
        _INCAST if way in ("direct", "exchange") and others > 1 else _CROSSING if way in ("halving", "rounds") else 1.0
    )
    if way == "chain":
        sent += (others - 1) * min(nbytes, Tuning.link)
    return waits * line.delay + messages * line.message + shared * sent / line.rate


def best(operation: str, ranks: int, nbytes: float, line: Line) -> str:
    """Returns the fastest way for a size; among ways that are as fast, one that sends no more than it must."""
    ways = [way for way in WAYS[operation] if way != "base"]
    if ranks > FEW and operation == "all_reduce":
        # A tensor to everybody is P - 1 times its bytes, even where that is no slower.
        ways.remove("exchange")
    cost = {way: seconds(operation, way, ranks, nbytes, line) for way in ways}
    return min(ways, key=lambda way: cost[way] * (_MARGIN if way in _WASTEFUL else 1.0))


def fitted(ranks: int, line: Line) -> Tuning:
    """Returns the table for a number of ranks on a line; the same on all ranks that give the same arguments."""
    if ranks <= FEW and line.delay < SHORT:
        return Tuning()
    tables: dict[str, Any] = {operation: table(operation, ranks, line) for operation in WAYS}
    return replace(Tuning(), **tables)


@functools.cache
def table(operation: str, ranks: int, line: Line) -> Limits:
    """Returns the best way of one collective by size."""
    chosen = [(nbytes, best(operation, ranks, nbytes, line)) for nbytes in _SIZES]
    limits = [(math.sqrt(here * there), way) for (here, way), (there, other) in pairwise(chosen) if way != other]
    return (*limits, (EVER, chosen[-1][1]))
