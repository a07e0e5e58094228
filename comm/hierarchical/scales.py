"""The factors that make a mean of sums over nodes of different sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bagua_kernels.comm.hierarchical.nodes import Nodes
from bagua_kernels.comm.reduction import HALF, ReduceOp
from bagua_kernels.compression import Codec


@dataclass(frozen=True)
class Scales:
    """By what values are scaled, and when.

    With W ranks on N nodes, a compressed step 2 returns the mean over nodes of weight * sum x / before. This is sum x / W
    for weight = before N / W, and sum x / N for weight = 1.

    Attributes:
        before: divides the vector before step 1, where sums of a half-precision mean might overflow.
        weight: multiplies this node's sums before a compressed step 2.
        in_float32: True if step 2 has to be in float32, on all nodes alike, because factors of half-precision values are not
            all 1.
        times: multiplies the result of a compressed step 2, and not its input, which might overflow in the codec where the
            sum does not.
        after: divides the result of a step 2 without compression.
    """

    before: int = 1
    weight: float = 1.0
    in_float32: bool = False
    times: int = 1
    after: int = 1

    @classmethod
    def of(cls, nodes: Nodes, local: int, dtype: torch.dtype, codec: Codec | None, op: ReduceOp) -> Scales:
        """Returns the factors on a node of `local` ranks."""
        half, mean, count = dtype in HALF, op is ReduceOp.AVG, len(nodes.members)
        if codec is None:
            return cls(before=nodes.size if mean and half else 1, after=nodes.size if mean and not half else 1)
        if not mean:
            return cls(in_float32=half, times=count)
        # Divided by its own ranks, each node holds its mean: no overflow, and on equal nodes weights of 1.
        before = local if half else 1
        return cls(before=before, weight=before * count / nodes.size, in_float32=half and not nodes.even)
