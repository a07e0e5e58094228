"""What the parameters of a bucket have in common, in an outer loop."""

from __future__ import annotations

from dataclasses import dataclass

from bagua_kernels.algorithms.models.kind import Kind
from bagua_kernels.algorithms.policy.schedule import Schedule
from bagua_kernels.bucket import Bucket


@dataclass(frozen=True)
class OuterKind(Kind):
    """What the parameters of a bucket have in common.

    Attributes:
        part: of the model, each of which has outer steps of its own.
        schedule: of the codecs that encode their pseudo-gradients; None if none does.
    """

    part: int = 0
    schedule: Schedule | None = None

    @classmethod
    def of(cls, part: int, schedule: Schedule | None) -> OuterKind:
        """Returns a kind whose parameters are whole blocks of the codecs."""
        return cls(1 if schedule is None else max(codec.block for codec in schedule.codecs), part, schedule)


def kind_of(bucket: Bucket) -> OuterKind:
    """Returns what the parameters of a bucket have in common."""
    assert isinstance(bucket.kind, OuterKind)
    return bucket.kind
