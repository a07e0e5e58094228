"""A communicator in two tiers: what it computes, what leaves a node, and that residuals lose nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels.comm import Communicator, Nodes, ReduceOp, run_ranks
from bagua_kernels.comm.compressed import all_reduce_for
from bagua_kernels.comm.hierarchical import TieredCommunicator
from bagua_kernels.compression import from_spec
from tests.grids import grid

LAYOUTS = [
    [[0, 1], [2, 3]],
    [[0], [1, 2], [3, 4, 5, 6]],
    [[0, 4], [1, 5], [2, 6], [3, 7]],
    [[0, 1, 2, 3], [4, 5, 6, 7]],
]
N = 3001


def ranks_of(layout: list[list[int]]) -> int:
    return sum(map(len, layout))


def tiered(communicator: Communicator, layout: list[list[int]]) -> TieredCommunicator:
    return TieredCommunicator(communicator, Nodes.given(layout))


def vector(rank: int, step: int = 0, n: int = N) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * rank + step))


@grid(cover=2, layout=LAYOUTS, n=[1, 5, N, 200_000], op=[ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX])
def test_sums_and_copies_are_those_of_all_ranks(layout: list[list[int]], n: int, op: ReduceOp) -> None:
    size = ranks_of(layout)

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        world = tiered(communicator, layout)
        x, other = vector(communicator.rank, 0, n), vector(communicator.rank, 1, n)
        first, second = world.all_reduce(x, op), world.all_reduce(other, op)
        second.wait()  # in another order than they were started
        first.wait()
        sent = vector(communicator.rank, 2, n)
        world.broadcast(sent, size - 1).wait()
        gathered = torch.zeros(size, n)
        world.all_gather(gathered, vector(communicator.rank, 3, n)).wait()
        assert world.all_gather_object(communicator.rank) == list(range(size))
        world.close()
        return [x, other, sent, gathered]

    found = run_ranks(size, rank)
    stacked = [np.stack([vector(r, step, n).double().numpy() for r in range(size)]) for step in (0, 1)]
    take = {ReduceOp.SUM: np.sum, ReduceOp.AVG: np.mean, ReduceOp.MAX: np.max}[op]
    for tensors in found:
        for got, rows in zip(tensors, stacked, strict=False):
            np.testing.assert_allclose(got.double().numpy(), take(rows, axis=0), rtol=1e-5, atol=1e-5)
        assert torch.equal(tensors[2], vector(size - 1, 2, n))
        assert torch.equal(tensors[3], torch.stack([vector(r, 3, n) for r in range(size)]))
        assert all(torch.equal(mine, first) for mine, first in zip(tensors, found[0], strict=True))


@grid(
    cover=2,
    layout=LAYOUTS,
    spec=[
        "minmax_uint8:block=64",
        "sign:block=64",
        "topk:ratio=0.05",
        "cast",
        "terngrad:block=64",
        "randomk:ratio=0.2",
    ],
    dtype=[torch.float32, torch.bfloat16],
    delivers=[False, True],
)
def test_what_goes_in_comes_out_or_is_kept(
    layout: list[list[int]], spec: str, dtype: torch.dtype, delivers: bool
) -> None:
    """The sum of the means of all inputs is that of the outputs and of the residuals, on equal nodes and on others."""
    size, steps, codec = ranks_of(layout), 4, from_spec(spec)
    feedback = not codec.linear and spec != "minmax_uint8:block=64"
    exact = 7

    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        world = tiered(communicator, layout)
        reduce = all_reduce_for(
            codec,
            world,
            N,
            exact,
            dtype,
            worker_residual=feedback,
            owner_residual=feedback,
            own=[slice(0, 640), slice(640, N)],
        )
        means = []
        for step in range(steps):
            x, beside = (
                vector(communicator.rank, step).to(dtype),
                vector(communicator.rank, 100 + step, exact).to(dtype),
            )
            if delivers and reduce.delivers:
                out = torch.full_like(x, torch.nan)
                reduce(x, beside, seed=step, deliver=lambda part, payload: codec.decode(payload, out[part]))  # noqa: B023
                x = out
            else:
                reduce(x, beside, seed=step)
            means.append(torch.cat([x, beside]))
        return means, reduce.vectors()

    found = run_ranks(size, rank)
    for means, vectors in found:
        assert all(torch.equal(mine, first) for mine, first in zip(means, found[0][0], strict=True))
        assert "owner" not in vectors or torch.equal(vectors["owner"], found[0][1]["owner"])
    inputs = sum(vector(r, step).to(dtype).double() for r in range(size) for step in range(steps)) / size
    outputs = sum(mean[:N].double() for mean in found[0][0])
    kept = sum((vectors["worker"].double() / size for _, vectors in found if "worker" in vectors), torch.zeros(N))
    kept = kept + found[0][1].get("owner", torch.zeros(N)).double()
    if feedback:
        # bfloat16 rounds each output.
        error = 1e-4 if dtype == torch.float32 else 0.05
        np.testing.assert_allclose((outputs + kept).numpy(), inputs.numpy(), atol=error)
    else:
        assert kept.norm() == 0
        assert (outputs - inputs).norm() < (
            1.2 if spec.startswith(("terngrad", "randomk")) else 0.05
        ) * inputs.norm() * 3
    for step, mean in enumerate(found[0][0]):
        wanted = sum(vector(r, 100 + step, exact).to(dtype).double() for r in range(size)) / size
        np.testing.assert_allclose(mean[N:].double().numpy(), wanted.numpy(), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_residuals_move_between_tiers_and_one_tier(layout: list[list[int]]) -> None:
    size, codec = ranks_of(layout), from_spec("sign:block=64")
    options: dict[str, Any] = {"worker_residual": True, "owner_residual": True}

    def rank(communicator: Communicator) -> tuple[torch.Tensor, ...]:
        flat = all_reduce_for(codec, communicator.duplicate(), N, **options)
        two = all_reduce_for(codec, tiered(communicator, layout), N, **options)
        for step in range(3):
            flat(vector(communicator.rank, step))
        before = flat.vectors()
        two.load_vectors(before)
        within = two.vectors()
        again = all_reduce_for(codec, tiered(communicator.duplicate(), layout), N, **options)
        again.load_vectors(within)
        x, y = vector(communicator.rank, 9), vector(communicator.rank, 9)
        two(x)
        again(y)
        if layout != LAYOUTS[1]:
            assert torch.equal(x, y)  # residuals are multiplied and divided by a power of two
        return before["worker"], before["owner"], within["worker"], within["owner"]

    found = run_ranks(size, rank)
    for before, within in ((0, 2), (1, 3)):
        sums = [sum(each[i].double() for each in found) for i in (before, within)]
        np.testing.assert_allclose(sums[0].numpy(), sums[1].numpy(), atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bytes_that_leave_a_node(layout: list[list[int]]) -> None:
    size, n, nodes = ranks_of(layout), 400_000, len(layout)

    def rank(communicator: Communicator, spec: str | None) -> int:
        world = tiered(communicator, layout)
        x = torch.ones(n)
        if spec is None:
            world.all_reduce(x, ReduceOp.AVG).wait()
        else:
            all_reduce_for(from_spec(spec), world, n)(x, seed=1)
        assert world.flat.bytes_sent == 0
        return world._tiers.bytes_across

    payload = from_spec("minmax_uint8").payload_size(n)
    sparse = from_spec("topk:ratio=0.01").payload_size(n)
    wanted = {None: 2 * (nodes - 1) / nodes * 4 * n, "minmax_uint8": 2 * (nodes - 1) / nodes * payload}
    wanted["topk:ratio=0.01"] = (nodes - 1) * sparse
    for spec, expected in wanted.items():
        sent = run_ranks(size, rank, spec)
        for node in layout:
            assert sum(sent[r] for r in node) == pytest.approx(expected, rel=0.05)
