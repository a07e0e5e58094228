"""Collectives in about log2 P rounds among any number of ranks: what a rank has is doubled, or what is left is halved.

In round k a rank deals with those at distance 2^k, modulo P. The all-gather is that of Bruck et al., "Efficient Algorithms for
All-to-All Communications in Multiport Message-Passing Systems", 1997; the reduce-scatter takes its rounds backwards. Both send
(P - 1) / P of the bytes, which is the least, also where P is no power of two. So does the all-reduce of the two, as in Träff,
"Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua_kernels.comm.backends.sockets.schedules.ranks import Ranks, chunks, combine_arrived
from bagua_kernels.comm.backends.sockets.transfer import Lane, Transfers
from bagua_kernels.comm.reduction import ReduceOp, divide_first, divide_last


def distances(size: int) -> list[tuple[int, int]]:
    """Returns for each round of an all-gather the distance, and how many ranks' parts go over it."""
    powers = [1 << k for k in range((size - 1).bit_length())]
    return [(distance, min(distance, size - distance)) for distance in powers]


def halving(ranks: Ranks, x: torch.Tensor, op: ReduceOp, lane: Lane) -> Transfers:
    """All-reduce: rounds that send half of what is left and add what arrives, then rounds that put the chunks together.

    Chunk r ends at rank r. Each rank adds what comes from 2^k ranks before it to its own, the largest distance first.
    """
    rank, size = ranks.rank, ranks.size
    starts = [piece.start for piece in chunks(x.numel(), size)] + [x.numel()]
    plan = distances(size)

    def parts(first: int, count: int) -> list[torch.Tensor]:
        """The chunks of some ranks that follow one another, in one part or, around the end, in two."""
        begin, end = first % size, first % size + count
        found = [x[starts[begin] : starts[min(end, size)]]]
        return found if end <= size else [*found, x[: starts[end - size]]]

    divide_first(x, op, size)
    arriving = [
        [lane.receive_anywhere((rank - distance) % size, part) for part in parts(rank, count)]
        for distance, count in reversed(plan)
    ]
    # A result can only come from ranks that have received what it overwrites.
    results = [
        [lane.receive((rank + distance) % size, part) for part in parts(rank + distance, count)]
        for distance, count in plan
    ]
    sent = []
    for (distance, count), arrivals in zip(reversed(plan), arriving, strict=True):
        sent += [lane.send((rank + distance) % size, part) for part in parts(rank + distance, count)]
        yield arrivals
        for arrival, part in zip(arrivals, parts(rank, count), strict=True):
            combine_arrived(lane, arrival, part, op)
    divide_last(x[starts[rank] : starts[rank + 1]], op, size)
    for (distance, count), result in zip(plan, results, strict=True):
        sent += [lane.send((rank - distance) % size, part) for part in parts(rank, count)]
        yield result
    yield sent


def gather_in_rounds(ranks: Ranks, outputs: Sequence[torch.Tensor], mine: torch.Tensor, lane: Lane) -> Transfers:
    """Everyone's input: in each round a rank sends what it has, and has twice as much after it."""
    rank, size, n = ranks.rank, ranks.size, mine.numel()
    # In memory of its own the inputs lie in the order of the ranks from this one on, so that a round is one message.
    found = ranks.scratch.take(size * n, mine.dtype)
    found[:n] = mine
    received = [
        lane.receive((rank + distance) % size, found[distance * n : (distance + count) * n])
        for distance, count in distances(size)
    ]
    sent = []
    for (distance, count), arrival in zip(distances(size), received, strict=True):
        sent.append(lane.send((rank - distance) % size, found[: count * n]))
        yield [arrival]
    for step in range(size):
        output = outputs[(rank + step) % size]
        if step or output.data_ptr() != mine.data_ptr():
            output.copy_(found[step * n : (step + 1) * n])
    yield sent
    ranks.scratch.give(found)


def reduce_scatter_in_rounds(
    ranks: Ranks, output: torch.Tensor, parts: Sequence[torch.Tensor], op: ReduceOp, lane: Lane
) -> Transfers:
    """Part r of everyone goes to rank r: in each round a rank sends half of what is left, and adds what arrives."""
    rank, size, n = ranks.rank, ranks.size, output.numel()
    sums = ranks.scratch.take(size * n, output.dtype)
    for step in range(size):
        sums[step * n : (step + 1) * n] = parts[(rank + step) % size]
    divide_first(sums, op, size)
    plan = distances(size)[::-1]
    arriving = [lane.receive_anywhere((rank - distance) % size, sums[: count * n]) for distance, count in plan]
    sent = []
    for (distance, count), arrival in zip(plan, arriving, strict=True):
        sent.append(lane.send((rank + distance) % size, sums[distance * n : (distance + count) * n]))
        yield [arrival]
        combine_arrived(lane, arrival, sums[: count * n], op)
    output.copy_(sums[:n])
    divide_last(output, op, size)
    yield sent
    ranks.scratch.give(sums)


def tree(ranks: Ranks, source: int, x: torch.Tensor, lane: Lane) -> Transfers:
    """Broadcast along a binomial tree: in each round, every rank that has the tensor sends it to one that has not."""
    position, size = (ranks.rank - source) % ranks.size, ranks.size
    distance = 1 << (size - 1).bit_length() if not position else position & -position
    if position:
        yield [lane.receive((ranks.rank - distance) % size, x)]
    sent = []
    while distance := distance // 2:
        if position + distance < size:
            sent.append(lane.send((ranks.rank + distance) % size, x))
    yield sent


def scattered(ranks: Ranks, source: int, x: torch.Tensor, lane: Lane) -> Transfers:
    """Broadcast: the source sends a chunk to each rank, which sends it to all others."""
    pieces = chunks(x.numel(), ranks.size)
    if ranks.rank == source:
        sent = [lane.send(peer, x[pieces[peer]]) for peer in ranks.others]
        yield [*sent, *(lane.send(peer, x[pieces[source]]) for peer in ranks.others)]
        return
    own = lane.receive(source, x[pieces[ranks.rank]])
    got = [lane.receive(peer, x[pieces[peer]]) for peer in ranks.others]
    yield [own]
    passed = [lane.send(peer, x[pieces[ranks.rank]]) for peer in ranks.others if peer != source]
    yield [*got, *passed]


def barrier_in_rounds(ranks: Ranks, lane: Lane) -> Transfers:
    """Barrier: after round k, a rank knows that 2^(k + 1) ranks have come."""
    token = torch.empty(0, dtype=torch.uint8, device="cpu")
    sent = []
    for distance, _ in distances(ranks.size):
        sent.append(lane.send((ranks.rank + distance) % ranks.size, token))
        yield [lane.receive((ranks.rank - distance) % ranks.size, token)]
    yield sent
