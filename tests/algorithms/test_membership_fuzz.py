"""Random trainings that lose ranks at random moments: nothing is wrong with any."""

from __future__ import annotations

import pytest

from tests.algorithms.membership_fuzz import SPECS, draw, faults, main

pytestmark = pytest.mark.usefixtures("one_thread")


def test_draws_cover_what_matters() -> None:
    drawn = [draw(seed) for seed in range(500)]
    assert {training.spec for training in drawn} == set(SPECS)
    assert {training.ranks for training in drawn} == set(range(3, 9))
    assert {len(training.ends) for training in drawn} == {0, 1, 2, 3}
    assert sum(0 in training.ends for training in drawn) > 150
    assert sum(any(end.heals for end in training.ends.values()) for training in drawn) > 40
    assert sum(bool(training.trips) for training in drawn) > 150


def test_trainings() -> None:
    assert faults(range(12)) == {}


@pytest.mark.slow
def test_many_trainings() -> None:
    """More: `python -m tests.algorithms.membership_fuzz --schedules 1000`."""
    assert main(["--schedules", "200", "--seed", "100"]) == 0
