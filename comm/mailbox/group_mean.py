"""The mean over some ranks by messages, without a communicator of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from bagua_kernels.comm.mailbox.mailbox import Mailbox
from bagua_kernels.comm.topology.average import weighted_sum

# Writes the mean of the rows of a matrix, a row per member, to a vector.
Mean = Callable[[torch.Tensor, torch.Tensor], None]


def mean_of_rows(rows: torch.Tensor, out: torch.Tensor) -> None:
    """Adds up rows in their order, in float32 at least, and divides by their number."""
    share = 1.0 / len(rows)
    weighted_sum(dict(enumerate(rows)), dict.fromkeys(range(len(rows)), share), out)


def group_mean(
    mailbox: Mailbox, members: Sequence[int], x: torch.Tensor, number: int, *, mean: Mean = mean_of_rows
) -> None:
    """Replaces `x` by its mean over some ranks, with the same bits on all of them; blocks.

    1. Member r gets chunk r of each member's vector, and adds them up in the order of ranks.
    2. Each member gets the means of all chunks.

    Args:
        mailbox: of this rank.
        members: the ranks, in ascending order, this one among them; equal on all.
        x: shape (n,), of any dtype; overwritten.
        number: of two exchanges, this and the next one; see `Mailbox.exchange`.
        mean: what step 1 computes.
    """
    if len(members) == 1:
        return
    place, count, n = members.index(mailbox.rank), len(members), x.numel()
    bounds = [n * i // count for i in range(count + 1)]
    parts = [x[begin:end] for begin, end in itertools.pairwise(bounds)]
    others = [(i, peer) for i, peer in enumerate(members) if i != place]
    rows = x.new_empty(count, parts[place].numel())
    rows[place] = parts[place]
    mailbox.exchange({peer: rows[i] for i, peer in others}, {peer: parts[i] for i, peer in others}, number).wait()
    own = torch.empty_like(parts[place])
    mean(rows, own)
    mailbox.exchange({peer: parts[i] for i, peer in others}, {peer: own for _, peer in others}, number + 1).wait()
    parts[place].copy_(own)
