"""Random exchanges among random ranks, of which one leaves in the middle."""

from __future__ import annotations

import numpy as np
import torch

from bagua_kernels.comm import Mailbox, Work
from bagua_kernels.errors import RankLostError
from tests.comm.mailbox.cases import value


def random_traffic(box: Mailbox, seed: int, numbers: int = 12) -> None:
    """Each number has sends of random sizes between random ranks; ranks start and wait in orders of their own.

    The last rank leaves after some of its exchanges. An exchange of another rank fails only if it takes part; all others
    end with the right values.
    """
    plan, order = np.random.default_rng(seed), np.random.default_rng([seed, box.rank])
    sizes = plan.integers(0, 40, (numbers, box.size, box.size)) * (plan.random((numbers, box.size, box.size)) < 0.6)
    victim, last = box.size - 1, int(plan.integers(0, numbers + 1))
    works: dict[int, tuple[Work, dict[int, torch.Tensor], set[int]]] = {}
    mine = order.permutation(numbers)[: last if box.rank == victim else numbers].tolist()
    for number in mine:
        others = [rank for rank in range(box.size) if rank != box.rank]
        got = {src: torch.empty(n, dtype=torch.float64) for src in others if (n := int(sizes[number, src, box.rank]))}
        sent = {dst: value(box.rank, dst, number, n) for dst in others if (n := int(sizes[number, box.rank, dst]))}
        works[number] = box.exchange(got, sent, number), got, {*got, *sent}
        if order.random() < 0.3:
            box.post(int(order.choice(others)), number.to_bytes(4, "big"))
    if box.rank == victim:
        box.leave("it was its time")
        return
    for number in order.permutation(numbers).tolist():
        work, got, partners = works[number]
        if (lost := lost_in(work)) is not None:
            assert lost == (victim,)
            assert victim in partners
            continue
        for src, tensor in got.items():
            assert tensor.equal(value(src, box.rank, number, tensor.numel())), (number, src)
    survivors = [rank for rank in range(victim) if rank != box.rank]
    met = {rank: torch.zeros(1) for rank in survivors}
    box.exchange(met, dict.fromkeys(survivors, torch.ones(1)), numbers).wait()
    while (letter := box.take(0.0)) is not None:
        assert int.from_bytes(letter[1], "big") < numbers


def lost_in(work: Work) -> tuple[int, ...] | None:
    """The ranks whose loss ended an exchange; None if it ended well."""
    try:
        work.wait()
    except RankLostError as error:
        return error.ranks
    return None
