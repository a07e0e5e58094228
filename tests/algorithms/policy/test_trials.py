"""A trial of compression by itself: blocks of steps, their times, and what decides."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bagua_kernels.algorithms.policy.only_if_faster import BLOCK_STEPS, BLOCKS, Trial

STEPS = BLOCK_STEPS * BLOCKS


def run_alone(trial: Trial, first: int, cost: Callable[[int, bool], float]) -> list[bool]:
    kinds = []
    for step in range(first, first + STEPS):
        kinds.append(trial.compresses(step))
        if step == first:
            trial.begin(step)
        assert not trial.due
        trial.note(step, cost(step - first, kinds[-1]))
    return kinds


@pytest.mark.parametrize("first", [0, 5, 1001])
def test_blocks_take_turns(first: int) -> None:
    trial = Trial()
    assert trial.outcome == ""
    assert run_alone(trial, first, lambda place, _: float(place)) == (
        [True] * 4 + [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4
    )  # fmt: skip
    assert trial.due
    assert trial.outcome == "running"
    assert trial.seconds == [place for place in range(4, STEPS) if place % 4]


@pytest.mark.parametrize(("with_", "without", "outcome"), [(1, 2, "compressed"), (2, 2, "compressed"), (3, 2, "plain")])
def test_median_decides(with_: float, without: float, outcome: str) -> None:
    """Not what compilation, first steps of blocks, and now and then a hiccup take."""

    def cost(place: int, compressed: bool) -> float:
        if place < 4 or place % 4 == 0 or place in (5, 9, 10, 14):
            return 1e6 if compressed == (outcome == "compressed") else 0.0
        return with_ if compressed else without

    trial = Trial()
    run_alone(trial, 3, cost)
    trial.decide([trial.seconds, [0.0] * len(trial.seconds)])
    assert (trial.outcome, trial.medians) == (outcome, (with_, without))
    assert trial.decided
    assert not trial.due
    assert [trial.compresses(step) for step in (0, 40, 44, 10**6)] == [outcome == "compressed"] * 4


def test_step_is_as_slow_as_its_slowest_rank() -> None:
    """Each rank by itself, or the mean, would have it otherwise."""
    trial = Trial()
    kinds = [kind for place, kind in enumerate(run_alone(trial, 0, lambda *_: 0.0)) if place >= 4 and place % 4]
    turns = [
        [9.0 if kind and i % 2 == rank else 1.0 if kind else 6.0 for i, kind in enumerate(kinds)] for rank in (0, 1)
    ]
    trial.decide(turns)
    assert trial.medians == (9, 6)
    assert trial.outcome == "plain"


def test_resumes_with_a_verdict_only() -> None:
    trial = Trial()
    run_alone(trial, 0, lambda *_: 1.0)
    trial.resume("running")
    assert (trial.outcome, trial.seconds) == ("", [])
    trial.resume("plain")
    assert not trial.compresses(0)
