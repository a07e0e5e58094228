"""Models whose gradients are given, and training of all ranks in one process."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from bagua_kernels.algorithms import (
    Algorithm,
    AutoTune,
    CompressedAllReduce,
)
from bagua_kernels.comm import Communicator, run_ranks
from tests.oracles.algorithms import Named, Shapes

# Tensors that fill blocks of 64, so that there is no padding.
FULL: Shapes = {"first": (16, 12), "bias": (64,), "second": (8, 2, 8), "scale": (64,)}

# Sizes that are divisible by nothing.
ODD: Shapes = {"first": (13, 11), "bias": (13,), "second": (7, 3, 5), "scale": ()}

STEPS = 5


class Given(nn.Module):
    """A module whose gradients are what it is called with, to the last bit; those left out it does not use."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(self.get_parameter(name) * g).sum() for name, g in gradients.items()]).sum()


Wrap = Callable[..., Algorithm]


def everything(wrap: Wrap) -> dict[str, Any]:
    """Options with which small parameters are compressed too."""
    chooses = isinstance(wrap, type) and issubclass(wrap, CompressedAllReduce)
    return {"exact": (), "min_numel": 0} if chooses else {}


def tuner(*arguments: Any, **options: Any) -> AutoTune:
    """`AutoTune` that averages exactly for longer than others, and longer than most tests."""
    algorithm = AutoTune(*arguments, **options)
    algorithm.search.exact_steps = 8
    return algorithm


Everyone = list[Named]


def draw(shapes: Shapes, ranks: int, steps: int = STEPS, seed: int = 0) -> list[Everyone]:
    """All ranks' gradients of all steps: of different sizes in each tensor, with something in common, and a few zeros."""
    rng = np.random.default_rng(seed)
    common = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    scale = {name: 10.0 ** rng.uniform(-4, 1) for name in shapes}

    def one(name: str) -> np.ndarray:
        values = scale[name] * (common[name] + rng.standard_normal(shapes[name]))
        return np.asarray(np.where(rng.random(shapes[name]) < 0.05, 0.0, values), np.float32)

    return [[{name: one(name) for name in shapes} for _ in range(ranks)] for _ in range(steps)]


class Trained(NamedTuple):
    """What came out of a run: the gradients that all ranks received in each step, and each rank's state after it."""

    means: list[Named]
    states: list[dict[str, Any]]


def follow(algorithm: Algorithm, own: Sequence[Named]) -> list[Named]:
    """Takes one step with each of one rank's gradients; returns the means."""
    means = []
    for named in own:
        algorithm.zero_grad(set_to_none=True)
        algorithm({name: torch.from_numpy(g.copy()) for name, g in named.items()}).backward()
        means.append({n: p.grad.numpy().copy() for n, p in algorithm.module.named_parameters() if p.grad is not None})
    return means


def same(a: Sequence[Named], b: Sequence[Named]) -> bool:
    """Whether all bits are equal."""
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(x[name].tobytes() == y[name].tobytes() for name in x)
        for x, y in zip(a, b, strict=True)
    )


def train(
    wrap: Wrap,
    shapes: Shapes,
    data: list[Everyone],
    states: list[dict[str, Any]] | None = None,
    ranks: int | None = None,
    **arguments: Any,
) -> Trained:
    """Runs an algorithm on all ranks, of which all must receive the same bits; begins from the states of others, if given."""

    def rank(communicator: Communicator) -> Trained:
        algorithm = wrap(Given(shapes), communicator=communicator, **{**everything(wrap), **arguments})
        if states is not None:
            algorithm.load_algorithm_state_dict(states)
        means = follow(algorithm, [everyone[communicator.rank] for everyone in data])
        state = algorithm.algorithm_state_dict()
        algorithm.close()
        return Trained(means, [state])

    everyone = run_ranks(ranks or len(data[0]), rank)
    assert all(same(everyone[0].means, other.means) for other in everyone[1:])
    return Trained(everyone[0].means, [r.states[0] for r in everyone])


def averaged(data: list[Everyone]) -> list[dict[str, np.ndarray]]:
    """The exact means of what went in."""
    return [{name: np.mean([g[name].astype(np.float64) for g in step], axis=0) for name in step[0]} for step in data]


def velocities(inputs: Sequence[Any], momentum: float, nesterov: bool = False) -> list[dict[str, np.ndarray]]:
    """What dense SGD with momentum would apply in each step."""
    u = {name: np.zeros_like(g) for name, g in inputs[0].items()}
    applied = []
    for g in inputs:
        u = {name: momentum * (u[name] + g[name]) if nesterov else momentum * u[name] + g[name] for name in u}
        applied.append({name: u[name] + g[name] if nesterov else u[name] for name in u})
    return applied


def worst(means: Sequence[Named], expected: Sequence[Mapping[str, Any]], name: str) -> float:
    """The largest error of a parameter's mean, relative to its largest."""
    errors = [np.abs(m[name] - e[name]).max() / np.abs(e[name]).max() for m, e in zip(means, expected, strict=True)]
    return float(max(errors))


def pairs(state: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What two states remember of the same parameters; of what only one of them names, zeros too."""
    found = []
    for key in sorted(state["vectors"].keys() | other["vectors"].keys()):
        one, two = (s["vectors"].get(key, {}) for s in (state, other))
        for name in sorted(one.keys() | two.keys()):
            like = torch.zeros_like(one.get(name, two.get(name)))
            found.append((one.get(name, like), two.get(name, like)))
    return found


def stored(state: Any) -> Any:
    """What a checkpoint makes of it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
