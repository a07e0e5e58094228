"""The steps of each collective, as the lanes of one rank: what it sends to whom, and what it does with what arrives.

With n ranks, b bytes a rank and a one-way delay of d, on links of B bytes a second:

name        delays           bytes a rank sends
exchange    1                (n-1) b
doubling    log2 n           b log2 n
direct      2                2 (n-1)/n b
halving     2 log2 n         2 (n-1)/n b
ring        2 (n-1)          2 (n-1)/n b

`doubling` and `halving` are recursive doubling and recursive halving with doubling (Thakur, Rabenseifner and Gropp,
Optimization of Collective Communication Operations in MPICH, 2005, section 4.4), where a number of ranks that is no
power of two costs another two delays. Results have the same bits on all ranks: every element is either reduced by one
rank, or by all in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import pairwise

import torch

from bagua_kernels.comm.backends.sockets.scratch import Scratch
from bagua_kernels.comm.backends.sockets.transfer import Lane, Steps, Transfer
from bagua_kernels.comm.reduction import HALF, ReduceOp, combine


class Ranks:
    """This rank among its fellows, with memory for what schedules put together.

    Args:
        rank: this one.
        size: how many there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        # Not all ranks begin with the same one, or its link would be the only one in use.
        self.others = tuple((rank + step) % size for step in range(1, size))
        self.scratch = Scratch()


def chunks(n: int, parts: int) -> list[slice]:
    """Cuts `n` elements into parts that differ by one element at most."""
    starts = [n * part // parts for part in range(parts + 1)]
    return [slice(begin, end) for begin, end in pairwise(starts)]


def exchange(ranks: Ranks, x: torch.Tensor, op: ReduceOp) -> Callable[[Lane], Steps]:
    """All-reduce: everyone sends everything to everyone, and all reduce in rank order."""

    def steps(lane: Lane) -> Steps:
        parts = ranks.scratch.take(ranks.size * x.numel(), x.dtype).view(ranks.size, -1)
        parts[ranks.rank] = x
        got = [lane.receive(peer, parts[peer]) for peer in ranks.others]
        sent = [lane.send(peer, x) for peer in ranks.others]
        yield [*got, *sent]
        reduce_rows(parts, x, op)
        ranks.scratch.give(parts.view(-1))

    return steps


def direct(ranks: Ranks, x: torch.Tensor, op: ReduceOp) -> Callable[[Lane], Steps]:
    """All-reduce: chunk r of everyone goes to rank r, which reduces in rank order and sends the result to everyone."""

    def steps(lane: Lane) -> Steps:
        pieces = chunks(x.numel(), ranks.size)
        own = x[pieces[ranks.rank]]
        got = [lane.receive_anywhere(peer, own) for peer in ranks.others]
        # A reduced chunk can only come from a rank that has received all of this rank's, so it overwrites nothing
        # that is still to be sent.
        results = [lane.receive(peer, x[pieces[peer]]) for peer in ranks.others]
        sent = [lane.send(peer, x[pieces[peer]]) for peer in ranks.others]
        yield got
        _reduce_arrived(lane, ranks, got, own, op)
        passed = [lane.send(peer, own) for peer in ranks.others]
        yield [*sent, *results, *passed]

    return steps


def ring(ranks: Ranks, x: torch.Tensor, op: ReduceOp) -> Callable[[Lane], Steps]:
    """All-reduce: chunks travel around a ring once to be reduced, and once more as results."""

    def steps(lane: Lane) -> Steps:
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
            _combine_arrived(lane, arrival, x[pieces[(rank - step - 1) % size]], op)
        divide_last(x[pieces[own]], op, size)
        for step, result in enumerate(results):
            sent.append(lane.send(right, x[pieces[(own - step) % size]]))
            yield [result]
        yield sent

    return steps


def doubling(ranks: Ranks, x: torch.Tensor, op: ReduceOp) -> Callable[[Lane], Steps]:
    """All-reduce: in round i, ranks that differ in bit i alone exchange and reduce everything."""

    def steps(lane: Lane) -> Steps:
        divide_first(x, op, ranks.size)
        place, count = yield from _fold(lane, ranks, x, op)
        if place is not None:
            distance = 1
            while distance < count:
                peer = _unfolded(place ^ distance, ranks.size)
                arrival = lane.receive_anywhere(peer, x)
                yield [arrival, lane.send(peer, x)]
                _combine_arrived(lane, arrival, x, op, first=place & distance == 0)
                distance *= 2
            divide_last(x, op, ranks.size)
        yield from _unfold(lane, ranks, x)

    return steps


def halving(ranks: Ranks, x: torch.Tensor, op: ReduceOp) -> Callable[[Lane], Steps]:
    """All-reduce: rounds that exchange and reduce half of what is left, then rounds that put the halves together."""

    def steps(lane: Lane) -> Steps:
        divide_first(x, op, ranks.size)
        place, count = yield from _fold(lane, ranks, x, op)
        if place is not None:
            rounds = _halves(place, count, x.numel())
            peers = [_unfolded(place ^ distance, ranks.size) for distance, _, _ in rounds]
            arriving = [lane.receive_anywhere(peer, x[kept]) for peer, (_, kept, _) in zip(peers, rounds, strict=True)]
            # A result can only come from a rank that has received what it overwrites.
            results = [lane.receive(peer, x[given]) for peer, (_, _, given) in zip(peers, rounds, strict=True)]
            sent, own = [], slice(0, x.numel())
            for (distance, own, given), peer, arrival in zip(rounds, peers, arriving, strict=True):
                sent.append(lane.send(peer, x[given]))
                yield [arrival]
                _combine_arrived(lane, arrival, x[own], op, first=place & distance == 0)
            divide_last(x[own], op, ranks.size)
            for (_, _, given), peer, result in zip(reversed(rounds), reversed(peers), reversed(results), strict=True):
                sent.append(lane.send(peer, x[own]))
                yield [result]
                own = slice(min(own.start, given.start), max(own.stop, given.stop))
            yield sent
        yield from _unfold(lane, ranks, x)

    return steps


def _halves(place: int, count: int, n: int) -> list[tuple[int, slice, slice]]:
    """For each round of `halving`, how far away its other rank is, what is kept of `n` elements and what is given."""
    rounds = []
    begin, end, distance = 0, n, count // 2
    while distance:
        middle = (begin + end) // 2
        lower, upper = slice(begin, middle), slice(middle, end)
        kept, given = (upper, lower) if place & distance else (lower, upper)
        rounds.append((distance, kept, given))
        begin, end, distance = kept.start, kept.stop, distance // 2
    return rounds


def reduce_scatter(
    ranks: Ranks, output: torch.Tensor, parts: Sequence[torch.Tensor], op: ReduceOp
) -> Callable[[Lane], Steps]:
    """Part r of everyone goes to rank r, which reduces in rank order."""

    def steps(lane: Lane) -> Steps:
        got = [lane.receive_anywhere(peer, output) for peer in ranks.others]
        sent = [lane.send(peer, parts[peer]) for peer in ranks.others]
        yield got
        if output.data_ptr() != parts[ranks.rank].data_ptr():
            output.copy_(parts[ranks.rank])
        _reduce_arrived(lane, ranks, got, output, op)
        yield sent

    return steps


def ring_reduce_scatter(
    ranks: Ranks, output: torch.Tensor, parts: Sequence[torch.Tensor], op: ReduceOp
) -> Callable[[Lane], Steps]:
    """Part r travels around the ring from rank r + 1 to rank r, and everyone on its way adds its own."""

    def steps(lane: Lane) -> Steps:
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

    return steps


def ring_all_gather(ranks: Ranks, outputs: Sequence[torch.Tensor], mine: torch.Tensor) -> Callable[[Lane], Steps]:
    """Everyone's input travels around the ring."""

    def steps(lane: Lane) -> Steps:
        rank, size = ranks.rank, ranks.size
        right, left = (rank + 1) % size, (rank - 1) % size
        if outputs[rank].data_ptr() != mine.data_ptr():
            outputs[rank].copy_(mine)
        for step in range(size - 1):
            yield [
                lane.receive(left, outputs[(rank - step - 1) % size]),
                lane.send(right, outputs[(rank - step) % size]),
            ]

    return steps


def all_to_all(
    ranks: Ranks, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Callable[[Lane], Steps]:
    """Input r goes to rank r and becomes output number `rank` there; this rank's own is copied."""

    def steps(lane: Lane) -> Steps:
        transfers = [lane.receive(peer, outputs[peer]) for peer in ranks.others]
        transfers += [lane.send(peer, inputs[peer]) for peer in ranks.others]
        own, mine = outputs[ranks.rank], inputs[ranks.rank]
        if own.data_ptr() != mine.data_ptr():
            own.copy_(mine)
        yield transfers

    return steps


def star(
    ranks: Ranks, centre: int, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], inward: bool
) -> Callable[[Lane], Steps]:
    """Everything to the centre, or everything from it: gather, scatter and small broadcasts.

    Args:
        ranks: this rank and the others.
        centre: the rank in the middle.
        outputs: at the centre if inward, one a rank; else the one of this rank.
        inputs: at the centre if outward, one a rank; else the one of this rank.
        inward: whether the centre receives.
    """

    def steps(lane: Lane) -> Steps:
        if ranks.rank != centre:
            yield [lane.send(centre, inputs[0]) if inward else lane.receive(centre, outputs[0])]
        elif inward:
            yield [lane.receive(peer, outputs[peer]) for peer in ranks.others]
        else:
            yield [lane.send(peer, inputs[peer]) for peer in ranks.others]

    return steps


def chain(ranks: Ranks, source: int, x: torch.Tensor) -> Callable[[Lane], Steps]:
    """Broadcast of one piece of many: each rank passes it on to the next, so that no link carries it twice."""

    def steps(lane: Lane) -> Steps:
        position = (ranks.rank - source) % ranks.size
        if position:
            yield [lane.receive((ranks.rank - 1) % ranks.size, x)]
        if position < ranks.size - 1:
            yield [lane.send((ranks.rank + 1) % ranks.size, x)]

    return steps


def rooted_reduce(ranks: Ranks, root: int, x: torch.Tensor, op: ReduceOp) -> Callable[[Lane], Steps]:
    """Reduce: chunk r of everyone goes to rank r, which reduces it in rank order and sends it to the root."""

    def steps(lane: Lane) -> Steps:
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

    return steps


def messages(
    sends: Sequence[tuple[int, torch.Tensor]] = (), receives: Sequence[tuple[int, torch.Tensor]] = ()
) -> Callable[[Lane], Steps]:
    """Messages to some ranks and from some."""

    def steps(lane: Lane) -> Steps:
        yield [lane.receive(*item) for item in receives] + [lane.send(*item) for item in sends]

    return steps


def cut(n: int, size: int) -> Iterator[slice]:
    """Cuts `n` elements into pieces of `size`, the last one shorter."""
    return (slice(begin, min(n, begin + size)) for begin in range(0, n, size))


def divide_first(x: torch.Tensor, op: ReduceOp, size: int) -> None:
    """Divides float16 and bfloat16 before they are summed; see `ReduceOp`."""
    if op is ReduceOp.AVG and x.dtype in HALF:
        x /= size


def divide_last(x: torch.Tensor, op: ReduceOp, size: int) -> None:
    """Divides float32 and float64 after they were summed; see `ReduceOp`."""
    if op is ReduceOp.AVG and x.dtype not in HALF:
        x /= size


def reduce_rows(rows: torch.Tensor | Sequence[torch.Tensor], output: torch.Tensor, op: ReduceOp) -> None:
    """Reduces the rows, from the first on, into `output`, which may be memory of one of them; uses the rows up."""
    size = len(rows)
    for row in rows:
        divide_first(row, op, size)
    total = rows[0]
    for row in rows[1:-1]:
        combine(op)(total, row, out=total)
    combine(op)(total, rows[-1], out=output)
    divide_last(output, op, size)


def _combine_arrived(lane: Lane, arrival: Transfer, x: torch.Tensor, op: ReduceOp, first: bool = False) -> None:
    """Reduces what has come from another rank into `x`, whose own is the first operand or else the second."""
    assert arrival.own is not None
    part = arrival.own.view(x.dtype)
    # The lower rank's operand first on both sides: of two NaNs, an addition keeps the first one's bits.
    combine(op)(*((x, part) if first else (part, x)), out=x)
    lane.free(arrival)


def _reduce_arrived(lane: Lane, ranks: Ranks, arrived: Sequence[Transfer], x: torch.Tensor, op: ReduceOp) -> None:
    """Reduces what has come from all others, and `x` in this rank's place, into `x`."""
    rows = {transfer.peer: transfer.own.view(x.dtype) for transfer in arrived if transfer.own is not None}
    rows[ranks.rank] = x
    reduce_rows([rows[rank] for rank in range(ranks.size)], x, op)
    for transfer in arrived:
        lane.free(transfer)


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
    _combine_arrived(lane, arrival, x, op)
    return ranks.rank // 2, count


def _unfolded(place: int, size: int) -> int:
    extra = size - (1 << (size.bit_length() - 1))
    return 2 * place + 1 if place < extra else place + extra


def _unfold(lane: Lane, ranks: Ranks, x: torch.Tensor) -> Steps:
    extra = ranks.size - (1 << (ranks.size.bit_length() - 1))
    if ranks.rank < 2 * extra:
        yield [lane.receive(ranks.rank + 1, x) if ranks.rank % 2 == 0 else lane.send(ranks.rank - 1, x)]
