"""A trial of compression by itself: blocks of steps, their times, and what decides."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bagua_kernels.algorithms.choosing.turns import BLOCK
from bagua_kernels.algorithms.policy.only_if_faster import BLOCKS, Trial

STEPS = BLOCK * BLOCKS


def run_alone(trial: Trial, cost: Callable[[int, bool], float]) -> list[bool]:
    kinds = []
    for place in range(STEPS):
        kinds.append(trial.compresses)
        assert not trial.turns.ended
        trial.note(cost(place, kinds[-1]))
    return kinds


def test_blocks_take_turns() -> None:
    trial = Trial()
    assert trial.outcome == ""
    assert run_alone(trial, lambda place, _: float(place)) == (
        [True] * 4 + [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4
    )  # fmt: skip
    assert trial.turns.ended
    assert trial.outcome == "running"
    assert sorted(trial.turns.seconds) == [place for place in range(4, STEPS) if place % 4]


@pytest.mark.parametrize(("with_", "without", "outcome"), [(1, 2, "compressed"), (2, 2, "compressed"), (3, 2, "plain")])
def test_median_decides(with_: float, without: float, outcome: str) -> None:
    """Not what compilation, first steps of blocks, and now and then a hiccup take."""

    def cost(place: int, compressed: bool) -> float:
        if place < 4 or place % 4 == 0 or place in (5, 9, 10, 14):
            return 1e6 if compressed == (outcome == "compressed") else 0.0
        return with_ if compressed else without

    trial = Trial()
    run_alone(trial, cost)
    trial.decide([trial.turns.seconds, [0.0] * len(trial.turns.seconds)])
    assert (trial.outcome, trial.medians) == (outcome, (with_, without))
    assert trial.decided
    assert trial.compresses == (outcome == "compressed")


def test_step_is_as_slow_as_its_slowest_rank() -> None:
    """Each rank by itself, or the mean, would have it otherwise."""
    trial = Trial()
    run_alone(trial, lambda *_: 0.0)
    # Those of compressed steps come first.
    kinds = [kind == "compressed" for kind, times in trial.turns.times.items() for _ in times]
    assert kinds == [True] * 12 + [False] * 12
    turns = [
        [9.0 if kind and i % 2 == rank else 1.0 if kind else 6.0 for i, kind in enumerate(kinds)] for rank in (0, 1)
    ]
    trial.decide(turns)
    assert trial.medians == (9, 6)
    assert trial.outcome == "plain"


def test_resumes_with_a_verdict_only() -> None:
    trial = Trial()
    run_alone(trial, lambda *_: 1.0)
    trial.resume("running")
    assert (trial.outcome, trial.turns.seconds) == ("", [])
    trial.resume("plain")
    assert not trial.compresses
