"""One gossip step with a topology."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.reduction import FLOATING, HALF
from bagua_kernels.comm.topology.base import TOLERANCE, Topology
from bagua_kernels.quotient import divide_

_LARGEST = 64  # divisor of weights that count as whole numbers


def neighbour_average(communicator: Communicator, topology: Topology, x: torch.Tensor, step: int = 0) -> None:
    """Replaces `x` by sum_j W[i, j] x_j: one gossip step, in which every rank takes part with the same step; blocks.

    Terms are added in ascending rank order, in the dtype of `x`, for float16 and bfloat16 in float32; see `weighted_sum`. Holds
    one tensor like `x` for each neighbour to hear from; for `Complete` use an all-reduce.

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
    rank order. Weights that are multiples of 1/d, such as 2/3 and 1/6, count as whole numbers, and the sum is divided by d
    (see `whole`).

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
    weights, divisor = whole(weights)
    plain = all(weight == 1.0 for weight in weights.values())
    total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
    product: torch.Tensor | None = None
    first, *others = weights.items()
    if plain and others:
        # Two in one pass over memory.
        second, *others = others
        torch.add(values[first[0]].to(wide), values[second[0]].to(wide), out=total)
    else:
        torch.mul(values[first[0]].to(wide), first[1], out=total)
    for peer, weight in others:
        if plain:
            total.add_(values[peer].to(wide))
        else:
            # The product is rounded before it is added: `alpha` would round once, and only on some processors.
            product = torch.mul(values[peer].to(wide), weight, out=product)
            total.add_(product)
    if divisor != 1:
        divide_(total, divisor)
    return total if total is out else out.copy_(total)


def whole(weights: Mapping[int, float]) -> tuple[dict[int, float], int]:
    """Returns weights as whole numbers and what to divide by, for the least divisor up to 64; else as they are, and 1.

    1/3 rounded to float32 is too large: with three of them the model would grow by 3e-8 in every step. Dividing a sum with
    whole weights has no bias, and gives ranks that average the same values the same bits.
    """
    for divisor in range(1, _LARGEST + 1):
        numbers = {peer: weight * divisor for peer, weight in weights.items()}
        if all(abs(number - round(number)) < TOLERANCE * divisor for number in numbers.values()):
            return {peer: float(round(number)) for peer, number in numbers.items()}, divisor
    return dict(weights), 1
