"""Random trainings in which layers are unused by rank and step: no difference between ranks, nor from plain PyTorch."""

from __future__ import annotations

import pytest

from tests import grids
from tests.algorithms.fuzz import by_threads, by_turns, compared, draw, main
from tests.grids import only

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.compiled]


def test_draws_cover_what_matters() -> None:
    drawn = [draw(seed) for seed in range(200)]
    assert {t.optimizer for t in drawn} == {"AdamW", "Adam", "RMSprop", "SGD"}
    assert {(t.ranks, t.early) for t in drawn} == {(2, False), (2, True), (3, False), (3, True)}
    assert sum(any(len(set(ranks)) > 1 for ranks in t.used) for t in drawn) > 150


@pytest.mark.parametrize("name", only(["AdamW", "RMSprop"], "AdamW"))
@pytest.mark.parametrize("seed", only(range(3), 0))
def test_layers_that_ranks_use_by_turns(seed: int, name: str) -> None:
    assert compared(by_turns(seed, name)) == []


def test_threads() -> None:
    assert by_threads(range(8 if grids.EVERYTHING else 4)) == {}


@pytest.mark.slow
def test_many_by_threads() -> None:
    """More: `python -m tests.algorithms.fuzz --threads 2000 --processes 300`."""
    assert main(["--threads", "150", "--first", "1000"]) == 0


@pytest.mark.slow
def test_many_by_processes() -> None:
    assert main(["--processes", "30", "--first", "1000"]) == 0
