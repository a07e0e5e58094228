"""What the guard answers to an error of a bucket's mean."""

from __future__ import annotations

import math

import pytest
import torch

from bagua_kernels.algorithms.policy.guard import ACTIONS, Guard, answer, wider
from bagua_kernels.bucket import Bucket
from bagua_kernels.compression import Sign


@pytest.mark.parametrize("action", ACTIONS)
def test_only_an_error_above_the_bound_counts(action: str) -> None:
    """An overflow, whose error is NaN, is not lost by the codec: it changes nothing, and nothing is said."""
    codec, guard = Sign(64), Guard(bound=1.5, action=action)
    bucket = Bucket([torch.zeros(64)], align=64, exact=[False], flags=0, index=0, kind=None, names=["weight"])
    for error in (0.0, 1.5, math.nan):
        assert answer(guard, codec, bucket, error, 64) is codec
    with pytest.warns(RuntimeWarning, match="above the guard's bound of 1.5"):
        then = answer(guard, codec, bucket, 1.6, 64)
    assert then == {"warn": codec, "widen": wider(codec, 64), "exact": None}[action]
