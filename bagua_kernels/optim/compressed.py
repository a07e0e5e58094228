"""Steps from gradients that are still encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bagua_kernels.compression.block import BlockCodec
from bagua_kernels.launchers.multitensor import FACTOR, SCALARS
from bagua_kernels.optim.plan import Launch


@dataclass(frozen=True)
class Encoded:
    """Gradients as a block codec has encoded them.

    Attributes:
        codec: which one.
        payloads: for each parameter, shape (ranks, bytes), uint8: of one rank or of several, whose sum is meant.
        scale: factor of the sum; 1 / ranks for the mean.
    """

    codec: BlockCodec
    payloads: Mapping[Tensor, Tensor]
    scale: float = 1.0

    def apply(self, launch: Launch, rows: Any) -> None:
        """Runs a launch's rule on decoded gradients, without writing these to memory."""
        variant = launch.variant
        if variant.extras or variant.stochastic:
            raise RuntimeError(
                f"a step from encoded gradients has no extras, got {variant.extras or 'stochastic rounding'}"
            )
        scalars = slice(SCALARS, SCALARS + variant.scalars)
        for index, parameter in enumerate(launch.params):
            columns = [column[index] for i, column in enumerate(launch.table.columns) if i != 1]
            self.codec.decode_apply(
                self.payloads[parameter],
                variant.rule,
                [column.detach().view(-1) for column in columns],
                [float(s) for s in rows[index, scalars]],
                scale=self.scale * float(rows[index, FACTOR]),
            )

    @contextmanager
    def standing_for_gradients(self, params: list[Tensor]) -> Iterator[None]:
        """Lets the parameters with a payload, and no others, appear to have a gradient: their own memory, which is not read."""
        held = [p.grad for p in params]
        try:
            for p in params:
                p.grad = p.detach() if p in self.payloads else None
            yield
        finally:
            for p, gradient in zip(params, held, strict=True):
                p.grad = gradient


def take_step(optimizer: Any, encoded: Encoded, step: Callable[[], Any]) -> None:
    """Takes a step of a fused optimizer from encoded gradients.

    Raises:
        ValueError: a payload is for a parameter that the optimizer does not have.
        RuntimeError: the optimizer needs more passes, or a parameter's elements do not lie in one stretch in their order.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    known = {id(p) for p in params}
    for parameter in encoded.payloads:
        if id(parameter) not in known:
            raise ValueError(f"a payload is for a parameter of shape {tuple(parameter.shape)} that is in no group")
        if not parameter.is_contiguous() or parameter.is_complex() or parameter.dtype == torch.float64:
            raise RuntimeError(
                f"encoded gradients are for contiguous parameters of at most 32 bits, got {parameter.dtype} with stride "
                f"{parameter.stride()}"
            )
    with encoded.standing_for_gradients(params):
        step()
