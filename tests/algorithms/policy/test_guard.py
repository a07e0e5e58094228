"""What the guard answers to an error of a bucket's mean."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from bagua_kernels.algorithms import OneBitAdam, SignSGD
from bagua_kernels.algorithms.policy.guard import ACTIONS, Guard, answer, wider
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import Sign
from tests.algorithms.ranks import Odd, batch


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


def test_an_error_is_told_once_and_counted() -> None:
    """On each rank, at many looks, of which each has another number."""

    def rank(communicator: Communicator) -> dict[str, int]:
        guard = Guard(every=1, bound=1e-6)
        model = SignSGD(Odd(), communicator=communicator, guard=guard, exact=(), min_numel=0)
        for step in range(5):
            model(batch(communicator.rank, step)).square().mean().backward()
        return model.stats().guards

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        everyone = run_ranks(2, rank)
    assert len([each for each in told if "guard's bound" in str(each.message)]) == 2
    assert all(guards["exceeded"] >= 5 for guards in everyone)


@pytest.mark.filterwarnings("ignore:the mean of bucket:RuntimeWarning")
@pytest.mark.parametrize("momentum", [False, True])
def test_a_decision_holds_from_the_next_step_on(momentum: bool) -> None:
    """All buckets of a kind are encoded once more in the step in which the first of them is found to lose too much."""

    def rank(communicator: Communicator) -> tuple[int, list[int], list[float]]:
        options = {"guard": Guard(every=1, bound=1e-6, action="exact"), "exact": (), "min_numel": 0, "bucket_bytes": 1}
        model = Odd()
        if momentum:
            algorithm = OneBitAdam(model, freeze_step=1, communicator=communicator, **options)
        else:
            algorithm = SignSGD(model, communicator=communicator, **options)
        optimizer = algorithm.optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
        looks = []
        for step in range(4):
            optimizer.zero_grad()
            algorithm(batch(communicator.rank, step)).square().mean().backward()
            optimizer.step()
            looks.append(algorithm.stats().guards["exceeded"])
        assert algorithm._engine is not None
        buckets = len(algorithm._engine.buckets.all)
        return buckets, looks, [p.sum().item() for p in model.parameters()]

    first, second = run_ranks(2, rank)
    assert first == second
    buckets, looks, _ = first
    assert buckets > 1
    assert looks == ([0, buckets, buckets, buckets] if momentum else [buckets] * 4)
