"""What rules around a quantizer get beside arrays: sums of payloads or of replicas."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bagua_kernels.launchers.arguments import FLOAT_DTYPES, Weights, check_vector
from bagua_kernels.launchers.blockwise.form import BlockForm
from bagua_kernels.rules.messages import MessageRule
from bagua_kernels.rules.optimizers import ElementwiseRule


@dataclass(frozen=True)
class RowSum:
    """How rows of replicas are summed up; their sum stands for the last array of a message's rule.

    Attributes:
        weighted: True if each row has a weight.
        divided: True if the sum is divided by a number.
    """

    weighted: bool
    divided: bool


@dataclass(frozen=True)
class Rows:
    """Rows of replicas, and the weights of their sum.

    Attributes:
        replicas: shape (ranks, n), float32.
        weights: of the sum.
    """

    replicas: torch.Tensor
    weights: Weights

    @property
    def kind(self) -> RowSum:
        """What kernels are compiled for."""
        return RowSum(self.weights.factors is not None, self.weights.divisor != 1.0)


@dataclass(frozen=True)
class Mixture:
    """How decoded payloads get into the arrays of a rule.

    Attributes:
        position: the place of their sum among the rule's arrays.
        each: the places of single payloads: what payload j decodes to, without a weight, is array `each[j]`.
        weighted: True if each payload has a weight in the sum.
        divided: True if the sum is divided by a number.
        tracked: True if each payload is added to a replica.
        counted: True if only some elements of each block are to be updated.
    """

    position: int = 1
    each: tuple[int, ...] = ()
    weighted: bool = False
    divided: bool = False
    tracked: bool = False
    counted: bool = False

    def others(self, update: ElementwiseRule) -> list[int]:
        """The places of the arrays that are in memory."""
        return [i for i in range(update.arrays) if i != self.position and i not in self.each]


@dataclass(frozen=True)
class Sources:
    """The payloads that are decoded, with what belongs to each.

    Attributes:
        payloads: shape (ranks, size), uint8.
        whole: their form.
        first: the block with which the arrays begin.
        scale: factor of the sum.
        weights: of the sum.
        replicas: shape (ranks, n), float32; None if there are none.
        counts: shape (blocks,), int32; None stands for all elements.
    """

    payloads: torch.Tensor
    whole: BlockForm
    first: int
    scale: float
    weights: Weights
    replicas: torch.Tensor | None
    counts: torch.Tensor | None

    def mixture(self, position: int, each: tuple[int, ...]) -> Mixture:
        """How they get into the arrays of a rule, at some places."""
        weighted, divided = self.weights.factors is not None, self.weights.divisor != 1.0
        return Mixture(position, each, weighted, divided, self.replicas is not None, self.counts is not None)


def check_arrays(arrays: list[torch.Tensor], device: torch.device) -> None:
    """Raises unless all arrays are contiguous vectors of one length on the device."""
    for i, array in enumerate(arrays):
        check_vector(f"array {i}", array, FLOAT_DTYPES)
        if array.shape != arrays[0].shape or array.device != device:
            raise ValueError(
                f"array {i} must have shape {tuple(arrays[0].shape)} on {device}, got {tuple(array.shape)} on {array.device}"
            )


def check_replicas(replicas: torch.Tensor, ranks: int | None, n: int, device: torch.device) -> None:
    """Raises unless `replicas` has a contiguous float32 row of `n` for each of `ranks`, or any number of them, on the device."""
    rows = "ranks" if ranks is None else ranks
    shaped = replicas.dim() == 2 and replicas.shape[1] == n and ranks in (None, replicas.shape[0])
    if not shaped or replicas.dtype != torch.float32 or not replicas.is_contiguous() or replicas.device != device:
        raise ValueError(
            f"replicas must be contiguous float32 of shape ({rows}, {n}) on {device}, got {replicas.dtype} of shape "
            f"{tuple(replicas.shape)} on {replicas.device}"
        )


def message_lines(message: MessageRule) -> tuple[str, str, str]:
    """The expressions of the three stages of a rule, over values v0, v1, …, scalars s0, s1, … and the decoded value d.

    Returns:
        A line that gives r<position> for each array written before, the expression of what is encoded, and such a line for the
        arrays written after. A stage without a function is empty.
    """
    values = ", ".join([f"v{i}" for i in range(message.arrays)] + [f"s{i}" for i in range(message.scalars)])
    before, after = (
        ", ".join(f"r{position}" for position in writes) for writes in (message.before_writes, message.after_writes)
    )
    return (
        f"{before} = before({values})" if before else "",
        f"value({values})",
        f"{after} = after(d, {values})" if after else "",
    )
