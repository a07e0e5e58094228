"""Means over ranks of optimizers' moments, less often than of parameters (DES-LOC, Iacob et al., 2025)."""

from __future__ import annotations

import torch

from bagua_kernels.algorithms.wrapping.replicas import average
from bagua_kernels.comm import Communicator
from bagua_kernels.comm.communicator import gather_json

# What optimizers of PyTorch and of this package call moving means of gradients, and of their squares or magnitudes.
FIRST = ("exp_avg", "momentum_buffer")
# A centred variance is not negative only if `grad_avg` is as old as `square_avg`.
SECOND = ("exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "acc_delta", "sum")


@torch.no_grad()
def average_moments(optimizer: torch.optim.Optimizer, names: tuple[str, ...], communicator: Communicator) -> None:
    """Replaces moments by their means over all ranks, in place; collective.

    A parameter that some rank has never used has no moments there, and keeps those of this rank here. Means of moments of
    squares are not negative. They are computed in float32 at least, and rounded to the moments' own dtype.

    Args:
        optimizer: whose states have moments by name.
        names: of the moments.
        communicator: of all ranks.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = {
        f"{place} {name}": state[name]
        for place, state in enumerate(optimizer.state.get(p, {}) for p in parameters)
        for name in names
        if isinstance(state.get(name), torch.Tensor) and state[name].is_floating_point()
    }
    shared = set(found).intersection(*gather_json(communicator, sorted(found)))
    average([found[key] for key in found if key in shared], communicator)
