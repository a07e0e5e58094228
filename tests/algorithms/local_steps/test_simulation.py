"""Training with local steps against simulations of all ranks in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bagua_kernels.algorithms import DiLoCo, LocalSGD, PostLocalSGD, SlowMo
from bagua_kernels.algorithms.local_steps.fragments import fragments_of
from tests.algorithms.gossip.common import SHAPES, Quadratic, Task, error, falling, flat
from tests.algorithms.local_steps.common import Case, trained
from tests.grids import grid
from tests.oracles import outer
from tests.oracles.gossip import SGD

STEPS = 20
START = flat(Quadratic()).double().numpy()
TASK = Task(len(START))
FRAGMENTS = 2


def fragments() -> list[Any]:
    """The elements of each fragment."""
    place = fragments_of(list(SHAPES), FRAGMENTS)
    of = np.concatenate([np.full(int(np.prod(shape)), place[name]) for name, shape in SHAPES.items()])
    return [np.flatnonzero(of == number) for number in range(FRAGMENTS)]


def inner(momentum: float) -> outer.Inner:
    return outer.inner(TASK.gradient, SGD(falling, momentum, 0.0))


CASES: dict[str, tuple[Case, Callable[..., outer.Simulation]]] = {
    "local_sgd": (Case(LocalSGD), lambda i, p: outer.local_sgd(START, i, ranks=p, interval=4)),
    "delayed": (Case(LocalSGD, {"delay": 3}), lambda i, p: outer.local_sgd(START, i, ranks=p, interval=4, delay=3)),
    "blended": (
        Case(LocalSGD, {"delay": 2, "blend": 0.25}),
        lambda i, p: outer.local_sgd(START, i, ranks=p, interval=4, delay=2, blend=0.25),
    ),
    "post_local_sgd": (
        Case(PostLocalSGD, {"first_phase": 5}),
        lambda i, p: outer.post_local_sgd(START, i, ranks=p, first_phase=5, interval=4),
    ),
    "slow_mo": (
        Case(SlowMo, {"slow_lr": 0.9, "slow_momentum": 0.6}),
        lambda i, p: outer.slow_mo(START, i, ranks=p, interval=4, lr=falling, slow_lr=0.9, slow_momentum=0.6),
    ),
    "diloco": (
        Case(DiLoCo, {"outer_lr": 0.5, "outer_momentum": 0.6}),
        lambda i, p: outer.diloco(START, i, ranks=p, interval=4, outer_lr=0.5, outer_momentum=0.6),
    ),
    "streaming": (
        Case(DiLoCo, {"outer_lr": 0.5, "outer_momentum": 0.6, "fragments": FRAGMENTS, "delay": 1, "blend": 0.5}),
        lambda i, p: outer.diloco(
            START, i, ranks=p, interval=4, outer_lr=0.5, outer_momentum=0.6, delay=1, blend=0.5, fragments=fragments()
        ),
    ),
}


@grid(name=list(CASES), size=[2, 3, 4, 5, 8], momentum=[0.0, 0.9], cover=1)
def test_follows_the_simulation(name: str, size: int, momentum: float) -> None:
    """Within 1e-6 of the largest magnitude after 20 steps."""
    case, simulation = CASES[name]
    found = trained(case, size, STEPS, momentum=momentum)
    expected = simulation(inner(momentum), size).run(STEPS).trajectory
    assert error(found.double().numpy(), expected) <= 1e-6


@grid(cover=1, name=["local_sgd", "slow_mo", "diloco"])
def test_a_wrong_simulation_is_seen(name: str) -> None:
    """The task tells rules apart: another interval is far outside."""
    case, simulation = CASES[name]
    found = trained(case, 3, STEPS, interval=5)
    expected = simulation(inner(0.0), 3).run(STEPS).trajectory
    assert error(found.double().numpy(), expected) > 1e-2


def test_half_precision_follows_with_outer_parameters_in_float32() -> None:
    """Ten rounds whose outer steps are smaller than what bfloat16 can tell apart: they add up in float32."""
    case = Case(DiLoCo, {"outer_lr": 2.0**-6, "outer_momentum": 0.0})
    found = trained(case, 2, 40, interval=1, dtype=torch.bfloat16, lr=lambda step: 2.0**-4)
    first, last = found[0, 0].double(), found[-1, 0].double()
    assert ((last - first).abs() > 1e-3).double().mean() > 0.9
