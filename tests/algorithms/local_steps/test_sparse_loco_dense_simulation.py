"""SparseLoCo's dense parameters against a simulation of all ranks in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels.algorithms import SparseLoCo
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import ChunkedTopK
from tests.algorithms import parts
from tests.algorithms.gossip.common import Quadratic, Task, error, falling, flat
from tests.algorithms.local_steps.common import Case, trained
from tests.algorithms.local_steps.test_sparse_loco import CHUNK, K, select_from
from tests.grids import grid
from tests.oracles import outer
from tests.oracles.gossip import SGD

STEPS = 20
# Sparse, dense, dense, of too few elements for a codec, and sparse again.
SHAPES = {"first": (13, 11), "bias": (300,), "small": (5, 6), "scale": (), "second": (7, 3, 5)}
START = flat(Quadratic(SHAPES)).double().numpy()
TASK = Task(len(START))
LEVELS = {"absmax_int8": 127, "absmax_int4": 7}
BLOCK = 32  # so that `small` is dense: with the default block it is shorter in float32
DENSE = ("bias", "small")


def case(dense: Any, **options: Any) -> Case:
    return Case(SparseLoCo, {"codec": ChunkedTopK(K, CHUNK), "dense": dense, **options})


def places(names: Any) -> np.ndarray[Any, Any]:
    """The elements of some parameters."""
    sizes = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
    begins = dict(zip(sizes, np.cumsum([0, *sizes.values()]), strict=False))
    return np.concatenate([begins[name] + np.arange(sizes[name]) for name in names])


class Rounding:
    """Rounds each block of each dense tensor to multiples of its greatest magnitude over `levels`, in float64.

    Attributes:
        levels: of a sign.
        decided: elements of which no value was so near the middle between two levels that float32 may have taken the other.
    """

    def __init__(self, levels: int) -> None:
        self.levels = levels
        self.decided = np.ones(len(START), bool)

    def __call__(self, row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        found, begin, where = np.zeros_like(row), 0, places(DENSE)
        for name in DENSE:
            end = begin + int(np.prod(SHAPES[name]))
            for start in range(begin, end, BLOCK):
                at = slice(start, min(start + BLOCK, end))
                greatest = float(np.float32(np.abs(row[at]).max()))
                scaled = row[at] * (self.levels / greatest)
                found[at] = np.rint(scaled) * (greatest / self.levels)
                self.decided[where[at]] &= np.abs(np.abs(scaled - np.rint(scaled)) - 0.5) > 1e-4
            begin = end
        return found


def select(row: np.ndarray[Any, Any]) -> Any:
    """What a rank sends beside the codec for dense parameters."""
    indices, values = select_from(row, SHAPES)
    kept = ~np.isin(indices, places(DENSE))
    return indices[kept], values[kept]


def simulated(size: int, levels: int, **options: Any) -> tuple[outer.Result, np.ndarray[Any, Any], Any]:
    """What all ranks come to, the residual of the mean, and the elements for which rounding has decided nothing."""
    rounding = Rounding(levels)
    dense = outer.Dense(places(DENSE), rounding)
    inner = outer.inner(TASK.gradient, SGD(falling, 0.0, 0.0))
    options = {"ranks": size, "interval": 4, "alpha": 0.8, "beta": 0.9, "select": select, "dense": dense, **options}
    result = outer.sparse_loco(START, inner, **options).run(STEPS)
    assert rounding.decided.sum() >= len(START) - 10
    return result, np.asarray(dense.owed), rounding.decided


@pytest.mark.slow
@grid(
    size=[2, 3, 4, 5],
    codec=list(LEVELS),
    reduce=["contributors", "mean"],
    options=[{}, {"delay": 2}, {"delay": 1, "blend": 0.25}],
    bucket_bytes=[1, 10 << 20],
    cover=1,
)
def test_follows_the_simulation(size: int, codec: str, reduce: Any, options: dict[str, Any], bucket_bytes: int) -> None:
    """Within 1e-6 of the largest magnitude after five rounds."""
    given = case(f"{codec}:block={BLOCK}", outer_lr=0.8, beta=0.9, reduce=reduce, **options)
    found = trained(given, size, STEPS, shapes=SHAPES, bucket_bytes=bucket_bytes).double().numpy()
    expected, _, decided = simulated(size, LEVELS[codec], reduce=reduce, **options)
    assert error(found[..., decided], expected.trajectory[..., decided]) <= 1e-6


@pytest.mark.parametrize("dense", [None, f"absmax_int4:block={BLOCK}"])
def test_a_wrong_simulation_is_seen(dense: Any) -> None:
    found = trained(case(dense, outer_lr=0.8, beta=0.9), 3, STEPS, shapes=SHAPES).double().numpy()
    expected, _, decided = simulated(3, LEVELS["absmax_int8"])
    assert error(found[..., decided], expected.trajectory[..., decided]) > 1e-4


@pytest.mark.parametrize("size", [2, 3])
def test_residuals_are_those_of_the_simulation(size: int) -> None:
    """That of each rank, and that of the mean."""

    def rank(communicator: Communicator) -> dict[str, dict[str, torch.Tensor]]:
        module = Quadratic(SHAPES)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        given = case(f"absmax_int8:block={BLOCK}", outer_lr=0.8, beta=0.9)
        with given.make(module, optimizer, communicator) as model:
            for number in range(STEPS):
                optimizer.param_groups[0]["lr"] = falling(number)
                optimizer.zero_grad()
                TASK.loss(model, communicator.rank, number).backward()
                optimizer.step()
            model.wait()
            return dict(parts.vectors(model))

    result, owed, decided = simulated(size, LEVELS["absmax_int8"])
    compared = decided[places(DENSE)]
    for vectors, residual in zip(run_ranks(size, rank), result.residuals[:, places(DENSE)], strict=True):
        assert vectors["worker"].keys() == vectors["owner"].keys() == set(DENSE)
        for key, expected in (("worker", residual), ("owner", owed)):
            found = torch.cat([vectors[key][name] for name in DENSE]).double().numpy()
            assert np.abs(found - expected)[compared].max() <= 2e-6
            assert np.abs(found).max() > 2e-4
