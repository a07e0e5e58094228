"""The collectives other than all-reduces, and messages between two ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua_kernels.comm.backends.sockets.schedules.ranks import Ranks, chunks, reduce_arrived, reduce_rows
from bagua_kernels.comm.backends.sockets.transfer import Lane, Transfers
from bagua_kernels.comm.reduction import HALF, ReduceOp, combine, divide_last


def reduce_scatter(
    ranks: Ranks, output: torch.Tensor, parts: Sequence[torch.Tensor], op: ReduceOp, lane: Lane
) -> Transfers:
    """Part r of everyone goes to rank r, which reduces in rank order."""
    got = [lane.receive_anywhere(peer, output) for peer in ranks.others]
    sent = [lane.send(peer, parts[peer]) for peer in ranks.others]
    yield got
    if output.data_ptr() != parts[ranks.rank].data_ptr():
        output.copy_(parts[ranks.rank])
    reduce_arrived(lane, ranks, got, output, op)
    yield sent


def ring_reduce_scatter(
    ranks: Ranks, output: torch.Tensor, parts: Sequence[torch.Tensor], op: ReduceOp, lane: Lane
) -> Transfers:
    """Part r travels around the ring from rank r + 1 to rank r, and everyone on its way adds its own."""
    rank, size, n = ranks.rank, ranks.size, output.numel()
    right, left = (rank + 1) % size, (rank - 1) % size
    half = op is ReduceOp.AVG and output.dtype in HALF
    # A rank hears from one other only, so that no link ever carries more than it can.
    current = parts[(rank - 1) % size]
    if half:
        current = current / size
    for step in range(size - 1):
        part = ranks.scratch.take(n, output.dtype)
        yield [lane.receive(left, part), lane.send(right, current)]
        own = parts[(rank - 2 - step) % size]
        combine(op)(part, own / size if half else own, out=part)
        if step:
            ranks.scratch.give(current)
        current = part
    output.copy_(current)
    if size > 1:
        ranks.scratch.give(current)
    divide_last(output, op, size)


def ring_all_gather(ranks: Ranks, outputs: Sequence[torch.Tensor], mine: torch.Tensor, lane: Lane) -> Transfers:
    """Everyone's input travels around the ring."""
    rank, size = ranks.rank, ranks.size
    right, left = (rank + 1) % size, (rank - 1) % size
    if outputs[rank].data_ptr() != mine.data_ptr():
        outputs[rank].copy_(mine)
    for step in range(size - 1):
        yield [
            lane.receive(left, outputs[(rank - step - 1) % size]),
            lane.send(right, outputs[(rank - step) % size]),
        ]


def all_to_all(ranks: Ranks, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], lane: Lane) -> Transfers:
    """Input r goes to rank r and becomes output number `rank` there; this rank's own is copied."""
    transfers = [lane.receive(peer, outputs[peer]) for peer in ranks.others]
    transfers += [lane.send(peer, inputs[peer]) for peer in ranks.others]
    own, mine = outputs[ranks.rank], inputs[ranks.rank]
    if own.data_ptr() != mine.data_ptr():
        own.copy_(mine)
    yield transfers


def star(
    ranks: Ranks,
    centre: int,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    lane: Lane,
    *,
    inward: bool,
) -> Transfers:
    """Everything to the centre, or everything from it: gather, scatter and small broadcasts.

    Args:
        ranks: this rank and the others.
        centre: the rank in the middle.
        outputs: at the centre if inward: one per rank; else the one of this rank.
        inputs: at the centre if outward: one per rank; else the one of this rank.
        lane: the lane that takes the steps.
        inward: True if the centre receives.
    """
    if ranks.rank != centre:
        yield [lane.send(centre, inputs[0]) if inward else lane.receive(centre, outputs[0])]
    elif inward:
        yield [lane.receive(peer, outputs[peer]) for peer in ranks.others]
    else:
        yield [lane.send(peer, inputs[peer]) for peer in ranks.others]


def chain(ranks: Ranks, source: int, x: torch.Tensor, lane: Lane) -> Transfers:
    """Broadcast of one piece of many: each rank passes it on to the next, so that no link carries it twice."""
    position = (ranks.rank - source) % ranks.size
    if position:
        yield [lane.receive((ranks.rank - 1) % ranks.size, x)]
    if position < ranks.size - 1:
        yield [lane.send((ranks.rank + 1) % ranks.size, x)]


def rooted_reduce(ranks: Ranks, root: int, x: torch.Tensor, op: ReduceOp, lane: Lane) -> Transfers:
    """Reduce: chunk r of everyone goes to rank r, which reduces it in rank order and sends it to the root."""
    pieces = chunks(x.numel(), ranks.size)
    own = x[pieces[ranks.rank]]
    rows = ranks.scratch.take(ranks.size * own.numel(), x.dtype).view(ranks.size, -1)
    rows[ranks.rank] = own
    got = [lane.receive(peer, rows[peer]) for peer in ranks.others]
    sent = [lane.send(peer, x[pieces[peer]]) for peer in ranks.others]
    results = [lane.receive(peer, x[pieces[peer]]) for peer in ranks.others] if ranks.rank == root else []
    yield got
    # The other ranks' tensors stay as they are.
    reduced = own if ranks.rank == root else rows[0]
    reduce_rows(rows, reduced, op)
    passed = [] if ranks.rank == root else [lane.send(root, reduced)]
    yield [*sent, *results, *passed]
    ranks.scratch.give(rows.view(-1))


def messages(
    sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]], lane: Lane
) -> Transfers:
    """Messages to some ranks and from some."""
    yield [lane.receive(*item) for item in receives] + [lane.send(*item) for item in sends]
