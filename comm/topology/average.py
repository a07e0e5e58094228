"""One gossip step with a topology."""

from __future__ import annotations

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.reduction import FLOATING, HALF
from bagua_kernels.comm.topology.base import Topology


def neighbour_average(communicator: Communicator, topology: Topology, x: torch.Tensor, step: int = 0) -> None:
    """Replaces `x` by sum_j W[i, j] x_j: one gossip step, in which every rank takes part with the same step; blocks.

    Terms are added in ascending rank order, in the dtype of `x`, for float16 and bfloat16 in float32. If all weights are
    1/n, the sum is divided by n. Holds one tensor like `x` for each neighbour to hear from; for `Complete` use an all-reduce.

    Args:
        communicator: of `topology.size` ranks, all with the same topology, see `Topology.check`.
        topology: whose matrix number `step` is W.
        x: this rank's values, floating-point (or `TypeError`), contiguous, on the communicator's device; overwritten.
        step: counts from 0.
    """
    if topology.size != communicator.size:
        raise ValueError(f"the topology is for {topology.size} ranks: expected one for {communicator.size=}")
    if x.dtype not in FLOATING:
        raise TypeError(f"expected x to be float64, float32, float16 or bfloat16, got {x.dtype}: convert it")
    x, rank = x.detach(), communicator.rank
    values = {peer: torch.empty_like(x) for peer in topology.neighbours_in(rank, step)}
    communicator.neighbour_exchange(values, dict.fromkeys(topology.neighbours_out(rank, step), x)).wait()
    values[rank] = x
    weights = {peer: weight for peer, weight in topology.weights(rank, step).items() if weight}
    # 1/3 rounded to float32 is too large: with three of them the model would grow by 3e-8 in every step. Dividing the
    # sum has no bias, and gives ranks that average the same values the same bits. -0.0 leaves even 0.0 as it is.
    mean = all(weight == 1 / len(weights) for weight in weights.values())
    total = torch.full_like(x, -0.0 if weights else 0.0, dtype=torch.float32 if x.dtype in HALF else x.dtype)
    for peer, weight in weights.items():
        total += values[peer] if mean else values[peer].to(total.dtype) * weight
    x.copy_(total / max(1, len(weights)) if mean else total)
