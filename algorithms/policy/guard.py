"""Watches how much compression loses, against exact means now and then, and does something about it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bagua_kernels.algorithms.policy.policy import Policy
from bagua_kernels.algorithms.policy.schedule import Schedule
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, ReduceOp
from bagua_kernels.compression import AbsMaxInt4, AbsMaxInt8, BlockCodec, Cast, Codec, from_spec
from bagua_kernels.compression.codec import to_spec
from bagua_kernels.options import FloatOrInf, check_fields
from bagua_kernels.suggestions import did_you_mean

ACTIONS = ("warn", "widen", "exact")


@dataclass(frozen=True)
class Guard:
    """When to look, and what to do; equal on all ranks.

    Attributes:
        every: steps between two looks at a bucket, each of which costs an exact all-reduce of it.
        bound: of the relative error of a bucket's mean, `|compressed - exact| / |exact|`, above which something is done.
            With error feedback a single step's mean is far from the exact one, near 1 for a sign, and no harm is done.
        action: "warn"; "widen", which takes more bits per element from then on; or "exact", which ends compression.

    Raises:
        ValueError: a number is out of its range, or the action is another.
    """

    every: int = 100
    bound: FloatOrInf = 1.5
    action: str = "warn"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.every < 1:
            raise ValueError(f"every must be 1 step or more, got {self.every}")
        if not self.bound > 0:
            raise ValueError(f"bound must be above 0, got {self.bound}")
        if self.action not in ACTIONS:
            raise ValueError(
                f"action must be one of {', '.join(ACTIONS)}, got {self.action!r}{did_you_mean(self.action, ACTIONS)}"
            )


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
        whole = torch.full((1,), relative(bucket.flat, self._exact), dtype=torch.float64, device=self._exact.device)
        self._communicator.broadcast(whole, 0).wait()
        # waits: a guard looks at few steps.
        return whole.item(), named


@dataclass(frozen=True)
class Decision:
    """What a look at a bucket leads to.

    Attributes:
        kind: of buckets.
        codec: what encodes them from the next step on; None for no compression.
    """

    kind: Hashable
    codec: Codec | None


class Guarded(Policy):
    """Chooses as another policy does, until the guard finds too much lost and decides otherwise."""

    def __init__(self, inner: Policy, guard: Guard, schedules: Mapping[str, Schedule], alignment: int) -> None:
        """Has decided nothing.

        Args:
            inner: the other policy.
            guard: when to look, and what to do.
            schedules: all kinds of buckets, by the names by which decisions are saved.
            alignment: the alignment of tensors in a bucket, in elements.
        """
        super().__init__(inner)
        self.guard = guard
        self._schedules = schedules
        self._alignment = alignment
        self._errors: dict[str, float] = {}
        self._exceeded = 0
        self._warned: set[tuple[Hashable, Codec]] = set()
        self._instead: dict[Hashable, Codec | None] = {}

    def codec(self, kind: Hashable, step: int) -> Any:
        """See `Policy.codec`. What the guard decided holds on, but a warm-up stays one."""
        planned = super().codec(kind, step)
        return self._instead.get(kind, planned) if planned is not None else None

    def looks(self, bucket: Bucket, step: int) -> bool:
        """Returns True if the guard looks at a bucket in a step."""
        return (step + bucket.index) % self.guard.every == 0

    def judge(self, bucket: Bucket, codec: Codec, sample: Sample) -> Decision | None:
        """Measures how much a bucket's mean has lost; collective.

        Returns:
            What the exchange gives to `decide` when the step ends; None if the codec stays.
        """
        error, errors = sample.errors(bucket)
        self._errors.update(errors)
        case = (bucket.kind, codec)
        then = answer(self.guard, codec, bucket, error, self._alignment, warns=case not in self._warned)
        if error > self.guard.bound:
            self._exceeded += 1
            self._warned.add(case)
        return None if then == codec else Decision(bucket.kind, then)

    def decide(self, decision: Decision) -> None:
        """Has a decision hold from the next step on; called in the order of buckets, on all ranks."""
        self._instead[decision.kind] = decision.codec

    def errors(self) -> dict[str, float]:
        """See `Policy.errors`."""
        return dict(self._errors)

    def guards(self) -> dict[str, int]:
        """See `Policy.guards`."""
        return {**super().guards(), "exceeded": self._exceeded}

    def state(self) -> list[Any]:
        """The specs of the codecs that were decided on, too; see `Policy.state`."""
        decided = [
            (name, None if (codec := self._instead[schedule]) is None else to_spec(codec))
            for name, schedule in self._schedules.items()
            if schedule in self._instead
        ]
        return [*super().state(), *([("guard", decided)] if decided else [])]

    def load(self, decisions: list[Any]) -> None:
        """See `Policy.load`."""
        super().load(decisions)
        self._instead = {
            self._schedules[name]: None if spec is None else from_spec(spec)
            for name, spec in dict(decisions).get("guard", ())
            if name in self._schedules
        }
        # Earlier states hold the schedules and codecs themselves.
        self._instead |= {kind: codec for kind, codec in decisions if isinstance(kind, Schedule)}


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over that of the exact vector."""
    difference, norm = float((found.double() - exact.double()).norm()), float(exact.double().norm())
    if norm == 0:
        return math.inf if difference else 0.0
    return difference / norm


def wider(codec: Codec, alignment: int) -> Codec | None:
    """The next codec with more bits per element; None, which is no compression, after 16.

    Blocks are no larger than what tensors are aligned to in a bucket; where that is less than a block can be, 16 bits follow.
    """
    if isinstance(codec, Cast):
        return None
    bits = codec.rule.bits if isinstance(codec, BlockCodec) else 0
    if bits >= 8 or alignment < 32:
        return Cast()
    return AbsMaxInt4(block=min(128, alignment)) if bits < 4 else AbsMaxInt8(block=min(256, alignment))


def answer(
    guard: Guard, codec: Codec, bucket: Bucket, error: float, alignment: int, *, warns: bool = True
) -> Codec | None:
    """What encodes buckets of this kind from now on; warns if asked to."""
    # What is not finite is an overflow, of which the optimizer or the gradient scaler knows.
    if not error > guard.bound:
        return codec
    then = {"warn": codec, "widen": wider(codec, alignment), "exact": None}[guard.action]
    if not warns:
        return then
    what = "nothing is changed" if then is codec else f"going on with {then or 'exact means'}"
    warnings.warn(
        f"the mean of bucket {bucket.index} ({bucket.names[0]} and {len(bucket.names) - 1} more) by {codec} has a relative "
        f"error of {error:.3g}, above the guard's bound of {guard.bound:g}: {what}; stats().guards counts how often; this "
        "warning comes once for a kind of bucket",
        RuntimeWarning,
        stacklevel=2,
    )
    return then
