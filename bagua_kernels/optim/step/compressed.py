"""Steps from gradients that are still encoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bagua_kernels.compression.block import BlockCodec
from bagua_kernels.launchers.multitensor import FACTOR, SCALARS
from bagua_kernels.optim.step.launch import Launch
from bagua_kernels.rules.optimizers import ElementwiseRule


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


class _Place(NamedTuple):
    """What a step of one parameter needs: the rule, vectors of the parameter and its states, and numbers."""

    rule: ElementwiseRule
    arrays: list[Tensor]
    scalars: list[float]
    factor: float

    @classmethod
    def of(cls, launch: Launch, rows: Any, index: int) -> _Place:
        state, scalars = launch.states[index], slice(SCALARS, SCALARS + launch.variant.scalars)
        arrays = [launch.params[index], *(state[name] for name in launch.names[2:])]
        vectors = [array.detach().as_strided((array.numel(),), (1,)) for array in arrays]
        return cls(launch.variant.rule, vectors, rows[index, scalars].tolist(), float(rows[index, FACTOR]))


class PayloadStep:
    """A step whose gradients are decoded where they are used, and may arrive in pieces.

    Args:
        codec: what has encoded them.
        launches: the parameters.
        rows: the scalars of each launch.
    """

    def __init__(self, codec: BlockCodec, launches: Sequence[Launch], rows: Sequence[Any]) -> None:
        self._codec = codec
        # waits: clipped gradients have their factors on the GPU, and this kernel takes scalars from the host.
        on_host = [row.cpu().numpy() if isinstance(row, Tensor) else row for row in rows]
        self._places = {
            id(parameter): _Place.of(launch, row, index)
            for launch, row in zip(launches, on_host, strict=True)
            for index, parameter in enumerate(launch.params)
        }

    def apply(
        self,
        parameter: Tensor,
        payloads: Tensor,
        *,
        span: slice = slice(None),
        first: int = 0,
        total: int | None = None,
        scale: float = 1.0,
    ) -> None:
        """Updates a parameter, or some of its elements, without writing their gradient to memory.

        Args:
            parameter: dense.
            payloads: shape (ranks, bytes), uint8, whose sum is meant.
            span: the elements, in the order in which they lie in memory.
            first: the block of the payloads with which they begin.
            total: elements that the payloads are of; those of the span by default.
            scale: factor of the sum.
        """
        place = self._places[id(parameter)]
        self._codec.decode_apply(
            payloads,
            place.rule,
            [array[span] for array in place.arrays],
            place.scalars,
            scale=scale * place.factor,
            first=first,
            total=total,
        )
