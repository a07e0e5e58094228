"""Random trainings that ranks join and leave at random moments: nothing is wrong with any."""

from __future__ import annotations

import pytest

from tests.algorithms.joining_fuzz import draw, faults, main
from tests.algorithms.membership_fuzz import SPECS

pytestmark = pytest.mark.usefixtures("one_thread")


def test_draws_cover_what_matters() -> None:
    drawn = [draw(seed) for seed in range(500)]
    assert {visit.spec for visit in drawn} == set(SPECS)
    assert {len(visit.joiners) for visit in drawn} == {1, 2, 3}
    assert {len(visit.ends) for visit in drawn} == {0, 1, 2}
    assert sum(any(each.has_draft for each in visit.joiners) for visit in drawn) > 200
    assert sum(any(each.end is not None for each in visit.joiners) for visit in drawn) > 100


@pytest.mark.slow
def test_trainings() -> None:
    wrong, joined = faults(range(300, 312))
    assert wrong == {}
    assert joined > 0


@pytest.mark.slow
def test_many_trainings() -> None:
    """More: `python -m tests.algorithms.joining_fuzz --schedules 1000`."""
    assert main(["--schedules", "30", "--seed", "400", "--specs", "bytegrad", "diloco:interval=3"]) == 0
