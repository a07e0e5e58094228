"""Watches how much compression loses, against exact means now and then, and does something about it."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch

from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, ReduceOp
from bagua_kernels.compression import AbsMaxInt4, AbsMaxInt8, BlockCodec, Cast, Codec

ACTIONS = ("warn", "widen", "exact")


@dataclass(frozen=True)
class Guard:
    """When to look, and what to do; equal on all ranks.

    Attributes:
        every: steps between two looks at a bucket, each of which costs an exact all-reduce of it.
        bound: of the relative error of a bucket's mean, `|compressed - exact| / |exact|`, above which something is done.
            With error feedback a single step's mean is far from the exact one, near 1 for a sign, and no harm is done.
        action: "warn"; "widen", which goes on with more bits an element; or "exact", which goes on without compression.

    Raises:
        ValueError: a number is out of its range, or the action is another.
    """

    every: int = 100
    bound: float = 1.5
    action: str = "warn"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be 1 step or more, got {self.every}")
        if not self.bound > 0:
            raise ValueError(f"bound must be above 0, got {self.bound}")
        if self.action not in ACTIONS:
            raise ValueError(f"action must be one of {', '.join(ACTIONS)}, got {self.action!r}")


class Sample:
    """The exact mean of what a bucket held, to compare the compressed one with; its making is collective."""

    def __init__(self, bucket: Bucket, communicator: Communicator) -> None:
        self._communicator = communicator
        self._exact = bucket.flat.clone()
        communicator.all_reduce(self._exact, ReduceOp.AVG).wait()

    def errors(self, bucket: Bucket) -> tuple[float, dict[str, float]]:
        """The relative error of the bucket's mean, and of each of its tensors; NaN where a mean is not finite; collective.

        0 where both means are zero, infinity where only the exact one is. Rank 0's number for the bucket is everyone's, so
        that all decide alike.
        """
        named = {
            name: relative(bucket.flat[span], self._exact[span])
            for slot, (name, span) in enumerate(zip(bucket.names, bucket.spans, strict=True))
            if bucket.compressed(slot)
        }
        whole = torch.tensor([relative(bucket.flat, self._exact)], dtype=torch.float64, device=self._exact.device)
        self._communicator.broadcast(whole, 0).wait()
        return whole.item(), named


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over that of the exact vector."""
    difference, norm = float((found.double() - exact.double()).norm()), float(exact.double().norm())
    if norm == 0:
        return math.inf if difference else 0.0
    return difference / norm


def wider(codec: Codec, alignment: int) -> Codec | None:
    """The next codec with more bits an element; None, which is no compression, after 16.

    Blocks are no larger than what tensors are aligned to in a bucket; where that is less than a block can be, 16 bits follow.
    """
    if isinstance(codec, Cast):
        return None
    bits = codec.rule.bits if isinstance(codec, BlockCodec) else 0
    if bits >= 8 or alignment < 32:
        return Cast()
    return AbsMaxInt4(block=min(128, alignment)) if bits < 4 else AbsMaxInt8(block=min(256, alignment))


def answer(guard: Guard, codec: Codec, bucket: Bucket, error: float, alignment: int) -> Codec | None:
    """What encodes buckets of this kind from now on."""
    # What is not finite is an overflow, of which the optimizer or the gradient scaler knows.
    if not error > guard.bound:
        return codec
    then = {"warn": codec, "widen": wider(codec, alignment), "exact": None}[guard.action]
    what = "nothing is changed" if then is codec else f"going on with {then or 'exact means'}"
    warnings.warn(
        f"the mean of bucket {bucket.index} ({bucket.names[0]} and {len(bucket.names) - 1} more) by {codec} has a relative "
        f"error of {error:.3g}, above the guard's bound of {guard.bound:g}: {what}",
        RuntimeWarning,
        stacklevel=2,
    )
    return then
