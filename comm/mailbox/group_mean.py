"""The mean over some ranks by messages, without a communicator of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from bagua_kernels.comm.mailbox.mailbox import Mailbox
from bagua_kernels.comm.topology.average import weighted_sum

NUMBERS = 4  # exchanges that a mean over some ranks may take

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
    if len(members) > 1:
        own = _reduce(mailbox, members, x, number, mean)
        _share(mailbox, members, x, own, number + 1)


def mean_by_nodes(
    mailbox: Mailbox, nodes: Sequence[Sequence[int]], x: torch.Tensor, number: int, *, mean: Mean = mean_of_rows
) -> None:
    """Replaces `x` by its mean over the ranks of some nodes, with the same bits on all of them; blocks.

    1. Inside each node, member r gets chunk r of each vector, and takes the mean.
    2. The members of one place on all nodes take the mean of these (`group_mean`).
    3. Inside each node, each member gets the means of all chunks.

    Args:
        mailbox: of this rank.
        nodes: the ranks of each, as many on all and in ascending order, this rank among them; equal on all.
        x: as for `group_mean`.
        number: of four exchanges, this and the next three.
        mean: as for `group_mean`.
    """
    members = next(node for node in nodes if mailbox.rank in node)
    place = members.index(mailbox.rank)
    own = _reduce(mailbox, members, x, number, mean)
    group_mean(mailbox, [node[place] for node in nodes], own, number + 1, mean=mean)
    _share(mailbox, members, x, own, number + 3)


def _parts(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    n = x.numel()
    return [x[begin:end] for begin, end in itertools.pairwise(n * i // count for i in range(count + 1))]


def _reduce(mailbox: Mailbox, members: Sequence[int], x: torch.Tensor, number: int, mean: Mean) -> torch.Tensor:
    """Returns the mean of this rank's chunk over all members."""
    place, parts = members.index(mailbox.rank), _parts(x, len(members))
    others = [(i, peer) for i, peer in enumerate(members) if i != place]
    rows = x.new_empty(len(members), parts[place].numel())
    rows[place] = parts[place]
    mailbox.exchange({peer: rows[i] for i, peer in others}, {peer: parts[i] for i, peer in others}, number).wait()
    own = torch.empty_like(parts[place])
    mean(rows, own)
    return own


def _share(mailbox: Mailbox, members: Sequence[int], x: torch.Tensor, own: torch.Tensor, number: int) -> None:
    """Puts the chunks of all members into `x`."""
    place, parts = members.index(mailbox.rank), _parts(x, len(members))
    others = [(i, peer) for i, peer in enumerate(members) if i != place]
    mailbox.exchange({peer: parts[i] for i, peer in others}, {peer: own for _, peer in others}, number).wait()
    parts[place].copy_(own)
