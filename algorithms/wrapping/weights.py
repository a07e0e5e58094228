"""Weights of ranks in a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence


def check_weights(weights: Sequence[float]) -> None:
    """Raises unless all weights are such."""
    for rank, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weight must be finite and 0 or more, got {weight} on rank {rank}")
