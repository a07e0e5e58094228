"""Exchange with neighbours: everyone decodes what was sent, and gossip mixes it with weights."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.compressed import NeighbourExchange
from bagua_kernels.compression import Codec, Identity, MinMaxUInt8, TopK
from tests.comm.compressed import simulation
from tests.grids import grid
from tests.oracles.vectors import make

SEED = 3


def vector(n: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(make("gaussian", n, 1.0, rank)).to(dtype)


def arrived(codec: Codec, n: int, rank: int, dtype: torch.dtype, like: torch.dtype) -> torch.Tensor:
    """What others decode of a rank's vector."""
    payload = codec.encode(vector(n, rank, dtype), seed=simulation.seed_1(codec, SEED, rank, 0))
    return codec.decode(payload, torch.empty(n, dtype=like))


@grid(ranks=[2, 3, 7], codec=[MinMaxUInt8(64, True), TopK(0.1), Identity()], dtype=[torch.float32, torch.bfloat16])
def test_ring(codec: Codec, ranks: int, dtype: torch.dtype) -> None:
    """Each tells the next rank and the one after that, and so hears from the two before."""
    for n in (0, 1, 65, 500):

        def rank(communicator: Communicator, n: int) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
            me = communicator.rank
            outs = {(me + d) % ranks for d in (1, 2)} - {me}
            ins = {(me - d) % ranks for d in (1, 2)} - {me}
            exchange = NeighbourExchange(codec, communicator, n, dtype)
            x = vector(n, me, dtype)
            heard = exchange(x, ins, outs, seed=SEED)
            assert torch.equal(x, vector(n, me, dtype))
            assert communicator.bytes_sent == len(outs) * codec.payload_size(n)
            mixed = exchange.mix(x, 0.5, {peer: 0.1 * (1 + peer) for peer in ins}, outs, seed=SEED)
            assert torch.equal(exchange.mix(x, 0.5, {p: 0.1 * (1 + p) for p in ins}, outs, seed=SEED, out=x), mixed)
            return heard, mixed

        for me, (heard, mixed) in enumerate(run_ranks(ranks, rank, n)):
            assert list(heard) == sorted({(me - d) % ranks for d in (1, 2)} - {me})
            total = 0.5 * vector(n, me, dtype).float()
            for peer, decoded in heard.items():
                assert torch.equal(decoded, arrived(codec, n, peer, dtype, dtype))
                total = total + 0.1 * (1 + peer) * arrived(codec, n, peer, dtype, torch.float32)
            assert torch.allclose(mixed.float(), total, atol=1e-6 if dtype == torch.float32 else 0.03)


def test_pairs_need_no_others() -> None:
    def rank(communicator: Communicator) -> torch.Tensor | None:
        if communicator.rank == 2:
            return None
        peer = 1 - communicator.rank
        exchange = NeighbourExchange(Identity(), communicator, 4)
        return exchange.mix(torch.full((4,), float(communicator.rank)), 0.5, {peer: 0.5}, [peer])

    results = run_ranks(3, rank)
    assert torch.equal(results[0], torch.full((4,), 0.5))
    assert torch.equal(results[1], torch.full((4,), 0.5))


def test_one_way() -> None:
    def rank(communicator: Communicator) -> dict[int, torch.Tensor]:
        exchange = NeighbourExchange(Identity(), communicator, 2)
        return exchange(torch.ones(2), [] if communicator.rank else [1], [0] if communicator.rank else [])

    assert [list(heard) for heard in run_ranks(2, rank)] == [[1], []]


def test_wrong_arguments() -> None:
    def rank(communicator: Communicator) -> None:
        exchange = NeighbourExchange(Identity(), communicator, 2)
        with pytest.raises(ValueError, match=r"shape \(2,\)"):
            exchange(torch.ones(3), [], [])
        for out, error in ((torch.ones(1), ValueError), (torch.ones(2, dtype=torch.float16), TypeError)):
            with pytest.raises(error, match="out must be"):
                exchange.mix(torch.ones(2), 1.0, {}, [], out=out)
        with pytest.raises(ValueError, match="another rank"):
            exchange(torch.ones(2), [0], [])

    run_ranks(1, rank)
