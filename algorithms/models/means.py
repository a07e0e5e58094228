"""Means of parameters and buffers over all ranks, and how far ranks are from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from bagua_kernels.algorithms.models.flat_parameters import FlatParameters
from bagua_kernels.algorithms.wrapping.buffers import RUNNING, averaged_names
from bagua_kernels.algorithms.wrapping.replicas import Give, average_from_first, give_all
from bagua_kernels.comm import Communicator, ReduceOp

Mean = Callable[[torch.Tensor], None]  # replaces a vector by its mean over ranks


@torch.no_grad()
def put_means(
    module: torch.nn.Module, flat: FlatParameters, sources: Iterable[torch.Tensor], mean: Mean, give: Give
) -> None:
    """Writes means over ranks into parameters and running statistics, and the first rank's other buffers; collective.

    Args:
        module: with the buffers, which get no new version for autograd.
        flat: its parameters.
        sources: for each bucket the vector whose mean is taken, in float32 at least. They are read one by one.
        mean: of one vector; collective.
        give: replaces bytes by those of the first rank; collective.
    """
    flat.check()
    for bucket, vector in zip(flat.buckets, sources, strict=True):
        wide = vector.to(torch.promote_types(vector.dtype, torch.float32), copy=True)
        mean(wide)
        bucket.flat.copy_(wide)
    names = averaged_names(module, RUNNING)
    give_all([buffer for name, buffer in module.named_buffers() if name not in names], give, _write)
    average_from_first([buffer for name, buffer in module.named_buffers() if name in names], mean, give, _write)


class Values:
    """Parameters and buffers of a module as they are now, to be put back."""

    def __init__(self, module: torch.nn.Module, flat: FlatParameters) -> None:
        """Copies them."""
        flat.check()
        self._flat, self._own = flat, flat.copies()
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]

    def put(self) -> None:
        """Puts them back."""
        for bucket, vector in zip(self._flat.buckets, self._own, strict=True):
            bucket.flat.copy_(vector)
        for buffer, each in self._buffers:
            _write(buffer, each)


def distance_from_mean(flat: FlatParameters, communicator: Communicator) -> float:
    """Returns sqrt(sum_i |x_i - xbar|^2 / P) over the P ranks, in float64; collective."""
    flat.check()
    squares = []
    for bucket in flat.buckets:
        mean = bucket.flat.to(torch.float64, copy=True)
        communicator.all_reduce(mean, ReduceOp.AVG).wait()
        # waits: for statistics.
        squares += [float((bucket.flat[span].double() - mean[span]).square().sum()) for span in bucket.spans]
    total = torch.full((1,), math.fsum(squares), dtype=torch.float64, device=communicator.device)
    communicator.all_reduce(total).wait()
    # waits: for statistics.
    return math.sqrt(float(total) / communicator.size)


def _write(buffer: torch.Tensor, values: torch.Tensor) -> None:
    buffer.data.copy_(values)
