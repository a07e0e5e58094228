"""What the parameters of a bucket have in common."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """What the parameters of a bucket have in common beside their dtype.

    Attributes:
        alignment: of parameters in the bucket, in elements.
    """

    alignment: int = 1
