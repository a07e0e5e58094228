"""Random trainings by all algorithms in which features meet: nothing is wrong with any."""

from __future__ import annotations

import pytest

from tests import grids
from tests.algorithms.meetings.fuzz import by_threads, draw, main
from tests.algorithms.meetings.rows import ROWS
from tests.algorithms.meetings.trainings import NEUTRAL

# A rank saves its own state.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:this state_dict"),
    pytest.mark.filterwarnings("ignore::bagua_kernels.algorithms.OptimizerFitWarning"),
]


def test_draws_cover_what_matters() -> None:
    drawn = [draw(seed) for seed in range(2000)]
    assert {training.row for training in drawn} == set(ROWS)
    assert {event.kind for training in drawn for event in training.events} == {*NEUTRAL, "load", "switch"}
    assert {training.ranks for training in drawn} == {2, 3, 4}
    assert sum(bool(training.overflows) for training in drawn) > 150
    assert sum(bool(training.left_out) for training in drawn) > 50
    assert sum(training.uneven for training in drawn) > 100


def test_threads() -> None:
    assert by_threads(range(40 if grids.EVERYTHING else 12)) == {}


@pytest.mark.slow
def test_many_by_threads() -> None:
    """More: `python -m tests.algorithms.meetings.fuzz --threads 2000 --processes 200`."""
    assert main(["--threads", "150", "--seed", "100"]) == 0


@pytest.mark.slow
def test_many_by_processes() -> None:
    assert main(["--processes", "20", "--seed", "300"]) == 0
