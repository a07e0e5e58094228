"""Steps from gradients that are still encoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bagua_kernels.compression.block import BlockCodec
from bagua_kernels.launchers.multitensor import FACTOR, SCALARS
from bagua_kernels.optim.launch import Launch


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

    def check(self, params: Sequence[Tensor]) -> None:
        """Raises unless all payloads fit parameters of an optimizer.

        Raises:
            ValueError: a payload is for a parameter that the optimizer does not have, or has a wrong size.
            RuntimeError: a parameter's elements do not lie in one stretch in their order, or have 64 bits.
        """
        known = {id(p) for p in params}
        for parameter, payloads in self.payloads.items():
            if id(parameter) not in known:
                raise ValueError(f"a payload is for a parameter of shape {tuple(parameter.shape)} that is in no group")
            if not parameter.is_contiguous() or parameter.is_complex() or parameter.dtype == torch.float64:
                raise RuntimeError(
                    f"encoded gradients are for contiguous parameters of at most 32 bits, got {parameter.dtype} with "
                    f"stride {parameter.stride()}"
                )
            size = self.codec.payload_size(parameter.numel())
            if payloads.dim() != 2 or payloads.shape[1] != size or payloads.dtype != torch.uint8:
                raise ValueError(
                    f"payloads must have shape (ranks, {size}) and be uint8, got {tuple(payloads.shape)} of {payloads.dtype}"
                )

    def apply(self, launch: Launch, rows: Any) -> None:
        """Runs a launch's rule on decoded gradients, without writing these to memory."""
        variant = launch.variant
        scalars = slice(SCALARS, SCALARS + variant.scalars)
        for index, (parameter, state) in enumerate(zip(launch.params, launch.states, strict=True)):
            arrays = [parameter, *(state[name] for name in launch.names[2:])]
            self.codec.decode_apply(
                self.payloads[parameter],
                variant.rule,
                [array.detach().view(-1) for array in arrays],
                [float(s) for s in rows[index, scalars]],
                scale=self.scale * float(rows[index, FACTOR]),
            )

    @contextmanager
    def standing_for_gradients(self, params: Sequence[Tensor]) -> Iterator[None]:
        """Lets the parameters with a payload, and no others, appear to have a gradient: their own memory, which is not read."""
        held = [p.grad for p in params]
        try:
            for p in params:
                p.grad = p.detach() if p in self.payloads else None
            yield
        finally:
            for p, gradient in zip(params, held, strict=True):
                p.grad = gradient
