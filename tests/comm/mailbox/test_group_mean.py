"""Means over groups by messages: exact, the same bits on all members, and with a codec nothing is lost."""

from __future__ import annotations

import numpy as np
import torch

from bagua_kernels.comm import Communicator, open_mailbox, run_ranks
from bagua_kernels.comm.compressed.encoded_mean import EncodedMean
from bagua_kernels.comm.mailbox.group_mean import group_mean
from bagua_kernels.compression import from_spec
from tests.grids import grid, only


def value(rank: int, n: int, dtype: torch.dtype, turn: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(97 * turn + rank), dtype=torch.float64).to(dtype)


@grid(
    members=[(0, 1), (1, 3), (0, 1, 2), (0, 2, 3, 4), (0, 1, 2, 3, 4)],
    n=[0, 1, 2, 4, 5, 1000],
    dtype=[torch.float32, torch.float64, torch.bfloat16],
)
def test_mean_of_a_group(members: tuple[int, ...], n: int, dtype: torch.dtype) -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        with open_mailbox(communicator) as box:
            x = value(box.rank, n, dtype)
            if box.rank in members:
                group_mean(box, members, x, 6)
            communicator.barrier().wait()
            return x

    everyone = run_ranks(5, rank)
    expected = np.mean([value(member, n, dtype).double().numpy() for member in members], axis=0)
    for number, x in enumerate(everyone):
        if number in members:
            assert torch.equal(x, everyone[members[0]])
            assert np.abs(x.double().numpy() - expected).max(initial=0.0) <= 4 * torch.finfo(dtype).eps * 3
        else:
            assert torch.equal(x, value(number, n, dtype))


def test_one_member_sends_nothing() -> None:
    def rank(communicator: Communicator) -> int:
        with open_mailbox(communicator) as box:
            group_mean(box, (box.rank,), torch.ones(3), 0)
            return box.bytes_sent

    assert run_ranks(2, rank) == [0, 0]


@grid(
    cover=1,
    codec=only(
        ["minmax_uint8:block=64", "sign:block=64", "qsgd:bits=2,block=32", "absmax_int4:block=32,stochastic=true"],
        *("minmax_uint8:block=64", "sign:block=64", "qsgd:bits=2,block=32"),
    ),
    size__n=[(2, 1000), (3, 70), (5, 33)],
)
def test_nothing_is_lost_by_a_codec(codec: str, size: int, n: int) -> None:
    """The reference is the sum of all means of differences, but for what is kept; and the same bits on all ranks."""
    turns = 6
    start = value(99, n, torch.float32)

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        with open_mailbox(communicator) as box:
            mean = EncodedMean(box, from_spec(codec), start)
            total = torch.zeros(n, dtype=torch.float64)
            for turn in range(turns):
                x = value(box.rank, n, torch.float32, turn)
                total += x.double() - mean.reference.double()
                mean.exchange(x, 2 * turn)
                assert torch.equal(x, mean.reference)
            communicator.barrier().wait()
            return mean.reference, total, mean.worker, mean.owner

    everyone = run_ranks(size, rank)
    reference = everyone[0][0].double()
    assert all(torch.equal(each, everyone[0][0]) for each, *_ in everyone)
    taken = torch.stack([total for _, total, *_ in everyone]).mean(0)
    kept = torch.stack([worker.double() for *_, worker, _ in everyone]).mean(0) + torch.cat([o for *_, o in everyone])
    assert (start + taken - kept - reference).abs().max() <= 1e-4


def test_what_is_rounded_away_comes_later() -> None:
    """Models that follow the mean come close to the exact one, far below the step of 8 bits."""

    def rank(communicator: Communicator) -> float:
        with open_mailbox(communicator) as box:
            mean = EncodedMean(box, from_spec("minmax_uint8"), torch.zeros(4000))
            x = value(box.rank, 4000, torch.float32)
            for turn in range(5):
                mean.exchange(x, 2 * turn)
            communicator.barrier().wait()
            exact = torch.stack([value(peer, 4000, torch.float32) for peer in range(box.size)]).mean(0)
            return float((x - exact).norm() / exact.norm())

    assert max(run_ranks(4, rank)) < 1e-4
