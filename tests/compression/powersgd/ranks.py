"""Ranks that exchange factors of matrices, in one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bagua_kernels.compression.powersgd import LowRank

SHAPES = [(20, 30), (5,), (8, 4, 3, 3), (20, 30), (), (20, 44), (0, 3), (6, 2, 5), (1, 7), (7, 1)]


def matrix(kind: str, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    z = rng.standard_normal(shape)
    if kind == "heavy":
        z = np.sign(z) * np.exp(2 * rng.standard_normal(shape))
    elif kind == "sparse":
        z = z * (rng.random(shape) < 0.02)
    elif kind == "constant":
        z = np.full(shape, 0.3)
    elif kind == "one_hot":
        z = np.zeros(shape)
        z.flat[rng.integers(z.size)] = -2.5
    return torch.from_numpy(np.asarray(z, np.float32))


def gradients(shapes: Sequence[Sequence[int]] = SHAPES, seed: int = 0) -> list[torch.Tensor]:
    return [matrix("gaussian", shape, 100 * seed + i) for i, shape in enumerate(shapes)]


def exchange(states: Sequence[LowRank], inputs: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """One step of all ranks, with the averages taken by hand."""
    outs = [[torch.full_like(x, 7.0) for x in tensors] for tensors in inputs]
    lefts = [state.left(tensors) for state, tensors in zip(states, inputs, strict=True)]
    average(lefts)
    rights = [state.right(left) for state, left in zip(states, lefts, strict=True)]
    average(rights)
    for state, right, out in zip(states, rights, outs, strict=True):
        state.finish(right, out)
    return outs


def average(factors: Sequence[torch.Tensor]) -> None:
    mean = torch.stack(list(factors)).mean(0)
    for factor in factors:
        factor.copy_(mean)


def residuals(state: LowRank) -> dict[str, torch.Tensor]:
    return {name: t.double() for name, t in state.state_dict()["residuals"].items()}


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.double().reshape(x.shape[0], -1)


def error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y.double()).norm() / x.double().norm())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))
