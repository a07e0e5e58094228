"""Checks of what a hierarchical all-reduce is made with."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bagua_kernels.comm.hierarchical.nodes import Nodes
from bagua_kernels.comm.reduction import HALF, ReduceOp, check_reduction
from bagua_kernels.compression import Codec


def given(nodes: Nodes | Iterable[Iterable[int]]) -> Nodes:
    """Takes lists of ranks for nodes, too."""
    if isinstance(nodes, Nodes):
        return nodes
    try:
        return Nodes.given(nodes)
    except TypeError as error:
        raise TypeError(
            f"expected nodes to be lists of ranks such as [[0, 1], [2, 3]], got {nodes!r}: {error}"
        ) from None


def check_arguments(
    n: int, dtype: torch.dtype, codec: Codec | None, op: ReduceOp, pieces: int | None, plain_below: int
) -> None:
    """Raises for arguments that make no sense."""
    check_reduction(op, dtype)
    if n < 0 or (pieces is not None and pieces < 1) or plain_below < 0:
        raise ValueError(
            f"expected n >= 0, pieces >= 1 or None, and plain_below >= 0, got {n=}, {pieces=}, {plain_below=}"
        )
    if codec is None:
        return
    if not isinstance(codec, Codec):
        raise TypeError(f"expected a codec, got {codec!r}; bagua_kernels.compression.from_spec makes one from text")
    if dtype not in HALF | {torch.float32}:
        raise TypeError(f"a codec takes float32, float16 and bfloat16, got {dtype}: leave out codec=")
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise ValueError(f"with a codec op must be ReduceOp.SUM or ReduceOp.AVG, got {op}: leave out codec=")
