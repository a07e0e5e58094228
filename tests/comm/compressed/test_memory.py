"""Memory for messages: what the exchanges of one communicator share."""

from __future__ import annotations

import gc

import pytest
import torch

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.compressed import all_reduce_for
from bagua_kernels.comm.compressed.memory import MessageMemory, Slots, lent
from bagua_kernels.compression import from_spec


@pytest.mark.parametrize("spec", ["minmax_uint8:block=32", "topk:ratio=0.1", "cast:dtype=float16"])
def test_all_reduces_share_the_memory_of_the_largest(spec: str) -> None:
    codec = from_spec(spec)
    sizes = (2000, 8000, 64, 4000)
    x = {n: torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in sizes}

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        many = {n: all_reduce_for(codec, communicator, n) for n in sizes}
        means = []
        for n in [*sizes, *sizes]:
            mean = x[n] + communicator.rank
            many[n](mean, seed=1)
            means.append(mean)
        free = MessageMemory.of(communicator).free
        assert len(free) == 1
        # Another object, with memory that nobody has used.
        for n, mean in zip(sizes, means, strict=False):
            alone = x[n] + communicator.rank
            all_reduce_for(codec, communicator.duplicate(), n)(alone, seed=1)
            assert torch.equal(alone, mean)
        return means

    first, second = run_ranks(2, rank)
    assert all(map(torch.equal, first, second))


def test_memory_of_a_failed_exchange_is_not_used_again() -> None:
    def rank(communicator: Communicator) -> None:
        slots = Slots(2, [16, 16, 16])
        under_way = lent(communicator, [slots])
        under_way.__enter__()
        assert slots[2].shape == (2, 16)
        error = RuntimeError("broken")
        assert not under_way.__exit__(RuntimeError, error, None)
        assert not MessageMemory.of(communicator).free
        with lent(communicator, [slots]), lent(communicator, [Slots(1, [64])]):
            pass
        assert sorted(each.numel() for each in MessageMemory.of(communicator).free) == [64, 64]

    run_ranks(1, rank)


def test_it_goes_with_its_communicator() -> None:
    gc.collect()
    before = len(MessageMemory._of)

    def rank(communicator: Communicator) -> None:
        with lent(communicator, [Slots(1, [16])]):
            pass

    run_ranks(2, rank)
    gc.collect()
    assert len(MessageMemory._of) <= before
