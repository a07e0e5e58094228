"""A codec that draws random numbers needs a seed: a default would give all messages the same ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.compressed import (
    CompressedAllGather,
    CompressedReduceScatter,
    NeighbourExchange,
    all_reduce_for,
)
from bagua_kernels.compression import Codec, MinMaxUInt8, RandomK, TernGrad, TopK
from tests.grids import only

N = 128
RANDOM = [MinMaxUInt8(stochastic=True), RandomK(0.5), RandomK(0.5, values="absmax_int8"), TernGrad(shared=True)]


def calls(codec: Codec, communicator: Communicator) -> list[Callable[..., Any]]:
    x, peer = torch.ones(N), [(communicator.rank + 1) % communicator.size] if communicator.size > 1 else []
    gather = CompressedAllGather(codec, communicator, N)
    shard, exchange = torch.ones(N)[gather.shard], NeighbourExchange(codec, communicator, N)
    return [
        lambda **seed: all_reduce_for(codec, communicator, N)(x.clone(), **seed),
        lambda **seed: CompressedReduceScatter(codec, communicator, N)(x, **seed),
        lambda **seed: gather(shard, **seed),
        lambda **seed: exchange(x, peer, peer, **seed),
        lambda **seed: exchange.mix(x, 0.5, dict.fromkeys(peer, 0.5), peer, **seed),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("codec", only(RANDOM, *RANDOM[::3]), ids=repr)
def test_a_seed_is_asked_for(codec: Codec) -> None:
    message = re.escape(f"{codec!r} draws random numbers: pass seed=fold_seed(seed, step, bucket)")

    def rank(communicator: Communicator) -> None:
        for call in calls(codec, communicator):
            with pytest.raises(ValueError, match=message):
                call()
            call(seed=0)
        all_reduce_for(codec, communicator, N, plain_below=N + 1)(torch.ones(N))

    run_ranks(2, rank)


@pytest.mark.parametrize("codec", [MinMaxUInt8(), TopK()], ids=repr)
def test_others_need_none(codec: Codec) -> None:
    run_ranks(2, lambda communicator: [call() for call in calls(codec, communicator)])


def test_one_rank_needs_none() -> None:
    run_ranks(1, lambda communicator: [call() for call in calls(RANDOM[0], communicator)])
