"""The hierarchical all-reduce with codecs: residuals, seeds and short vectors, and that no failure leaves ranks waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagua_kernels.comm import Communicator, ReduceOp, run_ranks
from bagua_kernels.comm.hierarchical.all_reduce import HierarchicalAllReduce
from bagua_kernels.compression import Cast, MinMaxUInt8, TernGrad, TopK, from_spec
from bagua_kernels.errors import CommunicationError
from tests import limits
from tests.grids import grid

NODES = [[0, 1], [2, 3]]
N = 1000


def make(communicator: Communicator, dtype: torch.dtype = torch.float32, **arguments: Any) -> HierarchicalAllReduce:
    return HierarchicalAllReduce(communicator, N, dtype, **({"nodes": NODES, "op": ReduceOp.AVG} | arguments))


def vector(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(100 * rank + step))


def test_a_sum_overflows_no_codec_that_could_hold_it_divided() -> None:
    def rank(communicator: Communicator, codec: Any, nodes: list[list[int]]) -> torch.Tensor:
        x = torch.full((N,), 40_000.0)
        make(communicator, nodes=nodes, codec=codec, op=ReduceOp.SUM)(x)
        return x

    for nodes in ([[0], [1]], [[0], [1], [2]]):
        for codec in (Cast("float16"), TopK(1.0, Cast("float16"))):
            for result in run_ranks(len(nodes), rank, codec, nodes):
                assert torch.equal(result, torch.full((N,), 40_000.0 * len(nodes)))


@grid(cover=1, spec=["sign:block=64", "absmax_int4:block=64"], op=[ReduceOp.AVG, ReduceOp.SUM])
def test_residuals_conserve_what_went_in(spec: str, op: ReduceOp) -> None:
    """What came out, the mean of the owners' residuals of each shard and those of the chunks are what went in."""
    steps = 5

    def rank(communicator: Communicator) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        all_reduce = make(
            communicator, codec=from_spec(spec), op=op, pieces=3, worker_residual=True, owner_residual=True
        )
        total = torch.zeros(N)
        for step in range(steps):
            x = vector(communicator.rank, step)
            all_reduce(x)
            total += x
        return total, all_reduce.state_dict()

    results = run_ranks(4, rank)
    assert {name for name, _ in (key.rsplit(".", 1) for key in results[0][1])} == {"0.0", "1.0", "2.0"}
    lacking = []
    for piece in range(3):
        for shard in range(2):
            owners = [results[shard][1], results[2 + shard][1]]
            workers = sum(state[f"{piece}.{shard}.worker"] for state in owners) / 2
            lacking.append(workers + torch.cat([state[f"{piece}.{shard}.owner"] for state in owners]))
    times = 2 if op is ReduceOp.SUM else 1  # step 2 takes a mean over the two nodes
    produced = torch.stack([vector(r, step) for r in range(4) for step in range(steps)]).sum(0)
    produced /= 1 if op is ReduceOp.SUM else 4
    assert torch.allclose(results[0][0] + times * torch.cat(lacking), produced, atol=2e-4)


def test_state_goes_on_where_it_was_saved() -> None:
    def rank(communicator: Communicator) -> None:
        options: dict[str, Any] = {"codec": from_spec("sign"), "pieces": 2, "worker_residual": True}
        before, after = make(communicator, **options), make(communicator, **options)
        before(vector(communicator.rank))
        state = before.state_dict()
        after.load_state_dict(state)
        x, y = vector(communicator.rank, 1), vector(communicator.rank, 1)
        before(x)
        after(y)
        assert torch.equal(x, y)
        kept, last = after.state_dict(), max(state)
        with pytest.raises(ValueError, match="another size"):
            after.load_state_dict(state | {last: torch.zeros(1)})
        assert all(torch.equal(kept[name], tensor) for name, tensor in after.state_dict().items())
        assert make(communicator, **options, plain_below=N).state_dict() == {}

    run_ranks(4, rank)


def test_short_shards_are_sent_plainly_and_need_no_seed() -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        x = vector(communicator.rank)
        make(communicator, codec=MinMaxUInt8(stochastic=True), plain_below=N)(x)
        with pytest.raises(ValueError, match="draws random numbers: pass seed="):
            make(communicator, codec=MinMaxUInt8(stochastic=True))(x.clone())
        make(communicator, codec=MinMaxUInt8(stochastic=True), nodes=[[0, 1, 2, 3]])(x.clone())  # one node, no codec
        return x

    mean = torch.stack([vector(r) for r in range(4)]).mean(0)
    for result in run_ranks(4, rank):
        assert torch.allclose(result, mean, atol=1e-6)


def test_every_piece_and_shard_draws_its_own_random_numbers() -> None:
    """The same values in each of them would be rounded alike by the same numbers."""

    def rank(communicator: Communicator) -> torch.Tensor:
        x = vector(0)[:128].repeat(4)
        all_reduce = HierarchicalAllReduce(
            communicator, 512, x.dtype, nodes=NODES, op=ReduceOp.AVG, pieces=2, codec=TernGrad(block=64)
        )
        all_reduce(x, seed=1)
        return x

    for result in run_ranks(4, rank):
        parts = result.view(4, 128)
        assert all(not torch.equal(parts[i], parts[k]) for i in range(4) for k in range(i))


@pytest.mark.parametrize("error", [MemoryError("no memory"), KeyboardInterrupt()], ids=repr)
def test_any_failure_in_the_middle_ends_the_others(error: BaseException) -> None:
    """Here and at once, not after their timeout."""

    def rank(communicator: Communicator) -> str:
        all_reduce = make(communicator, codec=MinMaxUInt8())
        if communicator.rank == 3:

            def fail(*arguments: Any) -> None:
                raise error

            all_reduce._reduction._compress = fail  # type: ignore[method-assign]
        with pytest.raises((CommunicationError, type(error))) as caught:
            all_reduce(torch.ones(N))
        return f"{type(caught.value).__name__} {caught.value.__notes__}"

    texts = run_ranks(4, rank, timeout=limits.seconds(60))
    assert texts[3].startswith(type(error).__name__)
    assert all("ranks of this node" in text for text in texts)


def test_arguments_are_compared_and_checked() -> None:
    def different(communicator: Communicator, name: str) -> None:
        with pytest.raises(ValueError, match=r"ranks \[0\] were given other arguments than ranks \[1, 2, 3\]"):
            make(communicator, codec=TernGrad(), **{name: communicator.rank == 0})

    for name in ("worker_residual", "owner_residual", "plain_below"):
        run_ranks(4, different, name)

    def wrong(communicator: Communicator) -> None:
        for codec in ("minmax_uint8", ["minmax_uint8"]):
            with pytest.raises(TypeError, match=r"expected a codec, got .*from_spec makes one"):
                make(communicator, codec=codec)
        for nodes in (5, [0, 1], "ab"):
            with pytest.raises(TypeError, match="expected nodes to be lists of ranks such as"):
                make(communicator, nodes=nodes)
        with pytest.raises(ValueError, match="plain_below=-1"):
            make(communicator, plain_below=-1)
        with pytest.raises(ValueError, match="scales that follow from the vector"):
            make(communicator, codec=TernGrad(shared=True), worker_residual=True)

    run_ranks(4, wrong)
