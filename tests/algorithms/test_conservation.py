"""Sent mean, residuals and velocities add up to all gradients: nothing is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels.algorithms import (
    DGC,
    CompressedAllReduce,
)
from tests.algorithms.rows import DGC_ROWS, POWERSGD_ROWS, ROWS, SAMPLE, Row
from tests.algorithms.training import FULL, ODD, averaged, draw, pairs, stored, train, velocities
from tests.grids import grid
from tests.oracles.algorithms import Shapes

pytestmark = pytest.mark.compiled

REMEMBERING = {name: row for name, row in ROWS.items() if row.remembers}

remembering = grid(cover=1, row=REMEMBERING)


def added(named: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    return np.sum([np.asarray(n[name], np.float64) for n in named], axis=0)


def remembered(states: Sequence[Mapping[str, Any]], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The mean of what ranks keep of a parameter, and what the owners do, of which all ranks know."""
    total = np.zeros(shape)
    for key in ("worker", "residual"):
        of_ranks = [s["vectors"].get(key, {}).get(name) for s in states]
        total += np.mean(
            [np.zeros(shape) if v is None else v.double().reshape(shape).numpy() for v in of_ranks], axis=0
        )
    owners = [s["vectors"].get("owner", {}).get(name) for s in states]
    if owners[0] is not None:
        assert all(torch.equal(owners[0], other) for other in owners[1:])
        total += owners[0].double().reshape(shape).numpy()
    return total


def check_conserved(shapes: Shapes, inputs: Sequence[Any], means: Sequence[Any], states: Sequence[Any]) -> None:
    for name, shape in shapes.items():
        went_in = added(inputs, name)
        size = np.sum([np.linalg.norm(i[name]) for i in inputs])
        lost = went_in - added(means, name) - remembered(states, name, shape)
        assert np.linalg.norm(lost) <= 1e-5 * size, name


@grid(
    row={**REMEMBERING, **POWERSGD_ROWS},
    ranks__shapes={"2 full": (2, FULL), "3 odd": (3, ODD), "4 full": (4, FULL)},
    cover=1,
)
def test_nothing_is_lost(row: Row, shapes: Shapes, ranks: int) -> None:
    data = draw(shapes, ranks, 7, seed=1)
    means, states = train(row.make, shapes, data)
    check_conserved(shapes, averaged(data), means, states)


@grid(ranks=[2, 3], nesterov=[False, True], shapes={"full": FULL, "odd": ODD})
def test_dgc_loses_no_momentum_without_masking(ranks: int, nesterov: bool, shapes: Shapes) -> None:
    """All velocities that ever were are applied or remembered; the velocity is that of dense SGD."""
    data = draw(shapes, ranks, 7, seed=2)
    options = {"ratio": 0.05, "momentum": 0.75, "masking": False, "nesterov": nesterov}
    means, states = train(DGC, shapes, data, **options)
    applied = velocities(averaged(data), 0.75, nesterov)
    check_conserved(shapes, applied, means, states)
    for name, shape in shapes.items():
        u = np.mean([s["vectors"]["velocity"][name].double().reshape(shape).numpy() for s in states], axis=0)
        last = applied[-1][name] - (averaged(data)[-1][name] if nesterov else 0)
        assert np.allclose(u, last, rtol=1e-5, atol=1e-5 * np.abs(last).max())


@pytest.mark.parametrize("codecs", [("sign", "minmax_uint8"), ("sign", "topk:ratio=0.1"), ("topk:ratio=0.1", "sign"),
                                    ("sign", "randomk:ratio=0.1"), ("sign", None), ("sign", "identity")],
                         ids=str)  # fmt: skip
def test_nothing_is_lost_when_codecs_change(codecs: tuple[Any, Any]) -> None:
    first, second = codecs
    data = draw(FULL, 3, 6)
    means, states = train(CompressedAllReduce, FULL, data, codec={0: first, 3: second})
    check_conserved(FULL, averaged(data), means, states)


@grid(cover=1, name=["bytegrad_feedback", "sign", "sign_buckets", "onebit", "double_squeeze_qsgd", "topk",
                                  "topk_buckets", "randomk", "powersgd", "powersgd_rank_2",
                                  "powersgd_in_turn"])  # fmt: skip
def test_nothing_is_lost_of_a_parameter_that_is_unused_for_a_step(name: str) -> None:
    """What a payload says of it must be applied or remembered, although its gradient is None on all ranks."""
    data = [[{n: g / np.abs(g).max() for n, g in named.items()} for named in everyone] for everyone in draw(FULL, 2, 6)]
    for everyone in (data[2], data[5]):
        for named in everyone:
            del named["first"]
    means, states = train(ROWS[name].make, FULL, data)
    zeros = {parameter: np.zeros(shape) for parameter, shape in FULL.items()}
    inputs = [{**zeros, **mean} for mean in averaged([[{**zeros, **g} for g in everyone] for everyone in data])]
    check_conserved(FULL, inputs, [{**zeros, **mean} for mean in means], states)


@grid(
    row=[
        given
        for given in SAMPLE
        if given.values[0] in (*REMEMBERING.values(), *DGC_ROWS.values(), *POWERSGD_ROWS.values())
    ],
    before__after=[(3, 2), (2, 4)],
    cover=1,
)
def test_another_number_of_ranks_keeps_the_mean(row: Row, before: int, after: int) -> None:
    """Every rank begins with the mean of what all ranks remembered; what all knew stays as it is."""
    old = train(row.make, ODD, draw(ODD, before)).states
    for state in train(row.make, ODD, [], stored(old), after).states:
        for vectors in zip(*(pairs(state, one) for one in old), strict=True):
            vector, of_ranks = vectors[0][0], torch.stack([own.double() for _, own in vectors])
            assert torch.allclose(vector.double(), of_ranks.mean(0), rtol=1e-6, atol=0)
            if torch.equal(of_ranks[0], of_ranks[1]) and torch.equal(of_ranks[0], of_ranks[-1]):
                assert torch.equal(vector.double(), of_ranks[0])


@remembering
def test_another_number_of_ranks_loses_nothing(row: Row) -> None:
    first, second = draw(ODD, 3, 4), draw(ODD, 2, 4, seed=8)
    old = train(row.make, ODD, first)
    new = train(row.make, ODD, second, stored(old.states))
    check_conserved(ODD, averaged(first) + averaged(second), old.means + new.means, new.states)
