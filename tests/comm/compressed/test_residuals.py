"""Error feedback on both passes: nothing is lost, and a state outlives its collective."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.compressed import (
    AllReduce,
    CompressedAllGather,
    CompressedAllReduce,
    CompressedReduceScatter,
    all_reduce_for,
)
from bagua_kernels.comm.compressed.residuals import Residuals
from bagua_kernels.compression import from_spec
from tests.grids import grid, only
from tests.oracles.vectors import make

STEPS, N = 6, 1000
SPECS = [
    *("minmax_uint8", "absmax_int4:block=64", "sign", "sign:two_means=true", "two_magnitudes:block=64"),
    *("qsgd:bits=2,block=32", "terngrad:block=64", "natural:block=64"),
]
ONE_PASS = [
    "topk:ratio=0.1",
    "threshold_topk:ratio=0.1",
    "randomk:ratio=0.1",
    "cast",
    "randomk:ratio=0.1,unbiased=true",
]


def inputs(rank: int) -> list[torch.Tensor]:
    return [torch.from_numpy(make("gaussian", N, 1.0, 100 * rank + step)) for step in range(STEPS)]


def run(communicator: Communicator, all_reduce: AllReduce) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    outputs = inputs(communicator.rank)
    for step, x in enumerate(outputs):
        all_reduce(x, seed=step)
    return outputs, all_reduce.state_dict()


def check_conservation(ranks: int, results: list[tuple[list[torch.Tensor], dict[str, torch.Tensor]]]) -> None:
    """What was applied, the workers' residuals and the owners' are what went in."""
    applied = torch.stack(results[0][0]).double().sum(0)
    lacking = sum(state["worker"].double() for _, state in results) / ranks
    owners = torch.cat([state.get("owner", torch.zeros(0)) for _, state in results]).double()
    produced = torch.stack([x for rank in range(ranks) for x in inputs(rank)]).double().sum(0) / ranks
    total = applied + lacking + (owners if owners.numel() else 0)
    assert (total - produced).norm() <= 1e-5 * max(produced.norm(), lacking.norm())
    for outputs, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(outputs, results[0][0], strict=True))


@grid(spec=only(SPECS, *SPECS[1::2]), ranks=[2, 3], pieces=[1, 3], cover=1)
def test_two_passes_conserve(spec: str, ranks: int, pieces: int) -> None:
    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        codec = from_spec(spec)
        made = CompressedAllReduce(codec, communicator, N, worker_residual=True, owner_residual=True, pieces=pieces)
        return run(communicator, made)

    check_conservation(ranks, run_ranks(ranks, rank))


@grid(cover=1, pieces=[None, 3], spec=ONE_PASS)
def test_one_pass_conserves(spec: str, pieces: int | None) -> None:
    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        codec = from_spec(spec)
        return run(communicator, all_reduce_for(codec, communicator, N, worker_residual=True, pieces=pieces))

    results = run_ranks(3, rank)
    if spec == "cast":  # the network rounds too, to 2**-8 at each addition
        applied = torch.stack(results[0][0]).sum(0)
        assert (applied - torch.stack([x for r in range(3) for x in inputs(r)]).sum(0) / 3).abs().max() < 0.1
    else:
        check_conservation(3, results)


@pytest.mark.slow
def test_feedback_helps() -> None:
    """The mean of what signs of one gradient decode to is the gradient, with both residuals, and far from it without."""

    def rank(communicator: Communicator, worker: bool, owner: bool) -> torch.Tensor:
        gradient = torch.from_numpy(make("gaussian", 512, 1.0, communicator.rank))
        all_reduce = CompressedAllReduce(
            from_spec("sign"), communicator, 512, worker_residual=worker, owner_residual=owner
        )
        total = torch.zeros(512)
        for _ in range(300):
            x = gradient.clone()
            all_reduce(x)
            total += x / 300
        return total

    mean = sum(torch.from_numpy(make("gaussian", 512, 1.0, r)) for r in range(2)) / 2
    errors = {key: float((run_ranks(2, rank, *key)[0] - mean).norm() / mean.norm()) for key in ((0, 0), (1, 0), (1, 1))}
    assert errors[1, 1] < 0.1 < errors[1, 0]
    assert errors[0, 0] > 0.3


def test_state_outlives_its_cutting() -> None:
    def rank(communicator: Communicator) -> None:
        def make_one(pieces: int) -> CompressedAllReduce:
            codec = from_spec("absmax_int4")
            return CompressedAllReduce(codec, communicator, N, worker_residual=True, owner_residual=True, pieces=pieces)

        before, after = make_one(1), make_one(1)
        other = make_one(3)
        assert all(not tensor.any() for tensor in before.state_dict().values())
        x, y = inputs(communicator.rank)[0], inputs(communicator.rank)[0]
        before(x)
        state = before.state_dict()
        after.load_state_dict(state)
        other.load_state_dict(state)
        for name, tensor in state.items():
            assert tensor.any()
            assert torch.equal(tensor, other.state_dict()[name])
        before(x := y.clone())
        after(y)
        assert torch.equal(x, y)
        other.load_state_dict({})
        assert all(not tensor.any() for tensor in other.state_dict().values())
        with pytest.raises(ValueError, match="another number of ranks"):
            other.load_state_dict(state | {"owner": torch.zeros(1)})
        # All or nothing: the other residual, which did fit, was not loaded either.
        assert all(not tensor.any() for tensor in other.state_dict().values())

    run_ranks(2, rank)


def test_halves_keep_residuals() -> None:
    def rank(communicator: Communicator) -> None:
        codec = from_spec("absmax_int4:block=64")
        scatter = CompressedReduceScatter(codec, communicator, N, worker_residual=True, pieces=2)
        gather = CompressedAllGather(codec, communicator, N, owner_residual=True, pieces=2)
        assert scatter.shard == gather.shard
        x = inputs(0)
        produced = torch.stack(x)[:, scatter.shard].sum(0)
        reduced = torch.stack([scatter(v) for v in x]).sum(0)
        lacking = scatter.state_dict()["worker"][scatter.shard]
        assert torch.allclose(reduced + lacking, produced, atol=1e-4)  # all ranks have the same vectors
        gathered = torch.stack([gather(v[scatter.shard].clone()) for v in x]).sum(0)
        assert torch.allclose(gathered[gather.shard] + gather.state_dict()["owner"], produced, atol=1e-4)
        gather.load_state_dict({})
        assert not gather.state_dict()["owner"].any()

    run_ranks(3, rank)


def test_a_mean_has_no_memory_where_none_is_encoded() -> None:
    def rank(communicator: Communicator) -> None:
        gather = CompressedAllGather(from_spec("sign"), communicator, N, owner_residual=True)
        gather(torch.ones(gather.shard.stop - gather.shard.start))
        assert gather._pass is not None
        assert gather._pass.mean.nbytes
        assert gather._pass.mean not in gather._pass.slots

    run_ranks(2, rank)


def test_shared_scales_allow_no_residual() -> None:
    def rank(communicator: Communicator) -> None:
        with pytest.raises(ValueError, match="scales that follow from the vector"):
            all_reduce_for(from_spec("terngrad:shared=true"), communicator, N, worker_residual=True)

    run_ranks(2, rank)


def test_a_vector_is_added_across_parts() -> None:
    residuals = Residuals(from_spec("sign:block=64"), [(0, 5), (1, 7), (2, 3)], torch.device("cpu"))
    residuals.add(3, torch.arange(1.0, 11.0))
    residuals.add(0, torch.tensor([100.0]))
    assert residuals.state().tolist() == [100, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0]
