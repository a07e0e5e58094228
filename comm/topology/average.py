"""One gossip step with a topology."""

from __future__ import annotations

from collections.abc import Mapping

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
    x.copy_(weighted_sum(values, topology.weights(rank, step), torch.empty_like(x)))


def weighted_sum(values: Mapping[int, torch.Tensor], weights: Mapping[int, float], out: torch.Tensor) -> torch.Tensor:
    """Writes the sum of some ranks' values, each times its weight, to `out`, and returns it.

    Products and sums are in the dtype of the values, for float16 and bfloat16 in float32; terms are added in ascending
    rank order. If all weights that are not zero are 1/n, the plain sum is divided by n.

    Args:
        values: by rank, of one shape, dtype and device; left as they are.
        weights: by rank; ranks of weight 0 need no values.
        out: of the values' shape, another memory.
    """
    weights = {peer: weights[peer] for peer in sorted(weights) if weights[peer]}
    dtype = next(iter(values.values())).dtype
    wide = torch.float32 if dtype in HALF else dtype
    if not weights:
        return out.zero_()
    # 1/3 rounded to float32 is too large: with three of them the model would grow by 3e-8 in every step. Dividing the
    # sum has no bias, and gives ranks that average the same values the same bits.
    mean = all(weight == 1 / len(weights) for weight in weights.values())
    total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
    product: torch.Tensor | None = None
    first, *others = weights.items()
    if mean and others:
        # Two in one pass over memory.
        second, *others = others
        torch.add(values[first[0]].to(wide), values[second[0]].to(wide), out=total)
    else:
        torch.mul(values[first[0]].to(wide), first[1], out=total)
    for peer, weight in others:
        if mean:
            total.add_(values[peer].to(wide))
        else:
            # The product is rounded before it is added: `alpha` would round once, and only on some processors.
            product = torch.mul(values[peer].to(wide), weight, out=product)
            total.add_(product)
    if mean and len(weights) > 1:
        total.div_(len(weights))
    return total if total is out else out.copy_(total)
