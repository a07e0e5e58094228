"""What schedules share: the ranks, how tensors are cut among them, and the arithmetic in rank order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from bagua_kernels.comm.backends.sockets.scratch import Scratch
from bagua_kernels.comm.backends.sockets.transfer import Lane, Transfer
from bagua_kernels.comm.reduction import ReduceOp, combine, divide_first, divide_last


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


def cut(n: int, size: int) -> Iterator[slice]:
    """Cuts `n` elements into pieces of `size`, the last one shorter."""
    return (slice(begin, min(n, begin + size)) for begin in range(0, n, size))


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


def combine_arrived(lane: Lane, arrival: Transfer, x: torch.Tensor, op: ReduceOp, first: bool = False) -> None:
    """Reduces what has come from another rank into `x`, whose own is the first operand or else the second."""
    assert arrival.own is not None
    part = arrival.own.view(x.dtype)
    # The lower rank's operand first on both sides: of two NaNs, an addition keeps the first one's bits.
    combine(op)(*((x, part) if first else (part, x)), out=x)
    lane.free(arrival)


def reduce_arrived(lane: Lane, ranks: Ranks, arrived: Sequence[Transfer], x: torch.Tensor, op: ReduceOp) -> None:
    """Reduces what has come from all others, and `x` in this rank's place, into `x`."""
    rows = {transfer.rank: transfer.own.view(x.dtype) for transfer in arrived if transfer.own is not None}
    rows[ranks.rank] = x
    reduce_rows([rows[rank] for rank in range(ranks.size)], x, op)
    for transfer in arrived:
        lane.free(transfer)
