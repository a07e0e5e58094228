"""What the parameters of a bucket have in common, in an outer loop."""

from __future__ import annotations

from typing import NamedTuple

from bagua_kernels.algorithms.policy.schedule import Schedule
from bagua_kernels.bucket import Bucket


class Kind(NamedTuple):
    """What the parameters of a bucket have in common.

    Attributes:
        part: see `OuterLoop.part`.
        schedule: of the codecs that encode their pseudo-gradients; None if none does.
    """

    part: int
    schedule: Schedule | None


def kind_of(bucket: Bucket) -> Kind:
    """Returns what the parameters of a bucket have in common."""
    assert isinstance(bucket.kind, Kind)
    return bucket.kind
