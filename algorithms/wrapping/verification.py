"""Compares what ranks have to have alike: by a sum of its bits, and by one of each tensor where these differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from bagua_kernels.algorithms.wrapping.replicas import bytes_of
from bagua_kernels.comm import Communicator, Work
from bagua_kernels.comm.communicator import gather_json
from bagua_kernels.errors import ReplicaError

T = TypeVar("T", int, float)
Named = Mapping[str, torch.Tensor]

_WORD = 8  # bytes
_MIX = 0x9E3779B97F4A7C15  # odd, so that a tensor's share is lost for no number
_MODULUS = 1 << 64


@torch.no_grad()
def state_hash(tensors: Sequence[torch.Tensor]) -> int:
    """Returns a number of 64 bits that is the same for the same bits, on any device and with any number of threads.

    It is the sum of the words of 8 bytes of each tensor, modulo 2^64, times a number of the tensor's place. Sums of whole numbers
    have no order. It takes one pass at the speed of memory. Differences that cancel each other are not seen: two words that have
    changed places, or all signs of a tensor of which half were negative.
    """
    sums = [each for tensor in tensors for each in _sums(tensor)]
    if not sums:
        return 0
    # waits: once in verify_every steps.
    found: list[int] = torch.stack(sums).tolist()
    return sum(value * (_MIX * (2 * place + 1)) for place, value in enumerate(found)) % _MODULUS


def _sums(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the sums of a tensor's whole words, and of the bytes that are left."""
    data = bytes_of(tensor)
    whole = data.numel() // _WORD * _WORD
    if whole:
        words = data[:whole]
        yield (words.clone() if words.storage_offset() % _WORD else words).view(torch.int64).sum()
    if whole < data.numel():
        yield data[whole:].sum(dtype=torch.int64)


def compare(communicator: Communicator, tensors: Named, what: str, step: int, counts: bool = True) -> Iterator[Work]:
    """Raises, on all ranks, unless all have the same bits; yields the work that the caller waits for.

    Args:
        communicator: of all ranks.
        tensors: by name, in the same order on all ranks.
        what: they are, in the plural.
        step: after how many it is.
        counts: False on a rank that is known to differ.

    Raises:
        ReplicaError: ranks differ.
    """
    numbers = [_signed(state_hash([*tensors.values()])), int(counts)]
    # waits: once in verify_every steps.
    own = torch.tensor(numbers, device=communicator.device)
    everyone = own.new_empty((communicator.size, 2))
    yield communicator.all_gather(everyone, own)
    # waits: once in verify_every steps.
    rows = everyone.tolist()
    compared = [rank for rank, row in enumerate(rows) if row[1]]
    if len({rows[rank][0] for rank in compared}) > 1:
        sums = [_signed(state_hash([tensor])) for tensor in tensors.values()]
        # waits: where ranks differ.
        each = torch.tensor(sums, device=communicator.device)
        table = each.new_empty((communicator.size, each.numel()))
        yield communicator.all_gather(table, each)
        # waits: where ranks differ.
        columns = [{rank: column[rank] for rank in compared} for column in table.T.tolist()]
        raise difference(list(tensors), columns, what, step)


def difference(names: Sequence[str], table: Sequence[Mapping[int, int]], what: str, step: int) -> ReplicaError:
    """Returns the error about the first tensor whose sums differ.

    Args:
        names: of the tensors.
        table: of each tensor the sums by rank.
        what: the tensors are, in the plural.
        step: after how many it is.
    """
    differing = [(name, row) for name, row in zip(names, table, strict=True) if len({*row.values()}) > 1]
    if not differing:
        return ReplicaError(f"{what} differed between ranks after step {step}, and were equal when looked at again")
    name, row = differing[0]
    usual, count = Counter(row.values()).most_common(1)[0]
    others = [rank for rank, value in row.items() if value != usual]
    # Of as many on both sides, nobody knows which ones are right.
    apart = f"on ranks {others}" if 2 * count > len(row) else f"between ranks {others} and the others"
    more = f", the first of {len(differing)} that differ" if len(differing) > 1 else ""
    return ReplicaError(
        f"{what} are not equal after step {step}: {name!r} differs {apart}{more}. Something has written to it on these ranks "
        "alone, or a device computes otherwise. Load a checkpoint; verify_every=1 finds the step after which they differ",
        others,
    )


def compare_copies(
    communicator: Communicator,
    member: int,
    own: Mapping[str, T],
    first: Callable[[Mapping[int, Mapping[str, T]]], str],
    step: int,
) -> None:
    """Raises, on all ranks, if a rank has another copy of a neighbour's state than the neighbour itself; collective, blocks.

    Args:
        communicator: of all ranks.
        member: this rank's number among those that have copies of each other: its own, or its node's.
        own: numbers that stand for its state, by the parameters' names.
        first: returns what differs first, of the numbers of each member; empty if nothing does.
        step: after how many it is.

    Raises:
        ReplicaError: some copy differs.
    """
    everyone = gather_json(communicator, [member, own])
    problems = gather_json(communicator, first(dict(everyone)))
    if ranks := [rank for rank, problem in enumerate(problems) if problem]:
        where = f"on rank {ranks[0]} {problems[ranks[0]]}"
        raise ReplicaError(
            f"copies of neighbours' parameters are not what these have after step {step}: {where}. "
            "Something has written to it, or a device decodes otherwise. Load a checkpoint; verify_every=1 finds the step",
            ranks,
        )


def _signed(value: int) -> int:
    return value - _MODULUS if value >= _MODULUS // 2 else value
