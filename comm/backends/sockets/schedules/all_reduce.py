"""The all-reduces: one for each size and network, see `schedules`."""

from __future__ import annotations

from collections.abc import Generator

import torch

from bagua_kernels.comm.backends.sockets.schedules.ranks import (
    Ranks,
    chunks,
    combine_arrived,
    reduce_arrived,
    reduce_rows,
)
from bagua_kernels.comm.backends.sockets.transfer import Lane, Transfer, Transfers
from bagua_kernels.comm.reduction import ReduceOp, divide_first, divide_last


def exchange(ranks: Ranks, x: torch.Tensor, op: ReduceOp, lane: Lane) -> Transfers:
    """All-reduce: everyone sends everything to everyone, and all reduce in rank order."""
    parts = ranks.scratch.take(ranks.size * x.numel(), x.dtype).view(ranks.size, -1)
    parts[ranks.rank] = x
    got = [lane.receive(peer, parts[peer]) for peer in ranks.others]
    sent = [lane.send(peer, x) for peer in ranks.others]
    yield [*got, *sent]
    reduce_rows(parts, x, op)
    ranks.scratch.give(parts.view(-1))


def direct(ranks: Ranks, x: torch.Tensor, op: ReduceOp, lane: Lane) -> Transfers:
    """All-reduce: chunk r of everyone goes to rank r, which reduces in rank order and sends the result to everyone."""
    pieces = chunks(x.numel(), ranks.size)
    own = x[pieces[ranks.rank]]
    got = [lane.receive_anywhere(peer, own) for peer in ranks.others]
    # A reduced chunk can only come from a rank that has received all of this rank's chunks. It overwrites nothing that
    # is still to be sent.
    results = [lane.receive(peer, x[pieces[peer]]) for peer in ranks.others]
    sent = [lane.send(peer, x[pieces[peer]]) for peer in ranks.others]
    yield got
    reduce_arrived(lane, ranks, got, own, op)
    passed = [lane.send(peer, own) for peer in ranks.others]
    yield [*sent, *results, *passed]


def ring(ranks: Ranks, x: torch.Tensor, op: ReduceOp, lane: Lane) -> Transfers:
    """All-reduce: chunks travel around a ring once to be reduced, and once more as results."""
    rank, size = ranks.rank, ranks.size
    right, left = (rank + 1) % size, (rank - 1) % size
    pieces = chunks(x.numel(), size)
    divide_first(x, op, size)
    own = (rank + 1) % size
    arriving = [lane.receive_anywhere(left, x[pieces[(rank - step - 1) % size]]) for step in range(size - 1)]
    # A result comes from a rank to which this one's share has come around the ring.
    results = [lane.receive(left, x[pieces[(own - step - 1) % size]]) for step in range(size - 1)]
    sent = []
    for step, arrival in enumerate(arriving):
        sent.append(lane.send(right, x[pieces[(rank - step) % size]]))
        yield [arrival]
        combine_arrived(lane, arrival, x[pieces[(rank - step - 1) % size]], op)
    divide_last(x[pieces[own]], op, size)
    for step, result in enumerate(results):
        sent.append(lane.send(right, x[pieces[(own - step) % size]]))
        yield [result]
    yield sent


def doubling(ranks: Ranks, x: torch.Tensor, op: ReduceOp, lane: Lane) -> Transfers:
    """All-reduce: in round i, ranks that differ in bit i alone exchange and reduce everything."""
    divide_first(x, op, ranks.size)
    place, count = yield from _fold(lane, ranks, x, op)
    if place is not None:
        distance = 1
        while distance < count:
            peer = _unfolded(place ^ distance, ranks.size)
            arrival = lane.receive_anywhere(peer, x)
            yield [arrival, lane.send(peer, x)]
            combine_arrived(lane, arrival, x, op, first=place & distance == 0)
            distance *= 2
        divide_last(x, op, ranks.size)
    yield from _unfold(lane, ranks, x)


def _fold(
    lane: Lane, ranks: Ranks, x: torch.Tensor, op: ReduceOp
) -> Generator[list[Transfer], None, tuple[int | None, int]]:
    """Leaves a power of two of ranks: the first few even ranks give their values to the odd ones beside them.

    Returns:
        This rank's place among those that stay, None for one that waits, and how many stay.
    """
    count = 1 << (ranks.size.bit_length() - 1)
    extra = ranks.size - count
    if ranks.rank >= 2 * extra:
        return ranks.rank - extra, count
    if ranks.rank % 2 == 0:
        yield [lane.send(ranks.rank + 1, x)]
        return None, count
    arrival = lane.receive_anywhere(ranks.rank - 1, x)
    yield [arrival]
    combine_arrived(lane, arrival, x, op)
    return ranks.rank // 2, count


def _unfolded(place: int, size: int) -> int:
    extra = size - (1 << (size.bit_length() - 1))
    return 2 * place + 1 if place < extra else place + extra


def _unfold(lane: Lane, ranks: Ranks, x: torch.Tensor) -> Transfers:
    extra = ranks.size - (1 << (ranks.size.bit_length() - 1))
    if ranks.rank < 2 * extra:
        yield [lane.receive(ranks.rank + 1, x) if ranks.rank % 2 == 0 else lane.send(ranks.rank - 1, x)]
