"""The study of short runs: what counts as best, which cells get more seeds, and what the page shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.short_runs import page, report, simulate, study
from bench.short_runs.simulate import Cell
from bench.short_runs.ways import AUTO, MEANS, WAYS, ways_of
from examples import corpus

LONG, SHORT = Cell(400, 8, "trained", "adamw"), Cell(10, 2, "scratch", "muon")


def losses(cell: Cell, **others: float) -> dict[str, float]:
    return {
        **dict.fromkeys([*ways_of(cell.rounds), "together"], 2.0),
        **{n.replace("_", " "): v for n, v in others.items()},
    }


def told(cell: Cell, *runs: dict[str, float]) -> dict[str, Any]:
    return {cell.name: {str(seed): run for seed, run in enumerate(runs)}}


def test_a_default_is_compared_with_the_best_pair_of_the_means_of_seeds() -> None:
    first = {**losses(SHORT), "nesterov 0.7 0.3": 1.9, AUTO["nesterov"]: 1.95, MEANS: 1.96}
    second = {**losses(SHORT), "nesterov 0.7 0.3": 2.2, AUTO["nesterov"]: 1.91, MEANS: 1.92}
    (row,) = report.summary(told(SHORT, first, second))
    assert row["seeds"] == 2
    assert row["nesterov"]["best"] == MEANS
    assert row["above_best"] == pytest.approx(-0.01)
    assert row["paper_above_best"] == pytest.approx(0.06)
    assert {"slow", "sparse"} <= set(row)


def test_long_runs_have_fewer_ways() -> None:
    (row,) = report.summary(told(LONG, losses(LONG)))
    assert "slow" not in row
    assert set(ways_of(400)) < set(WAYS) == set(ways_of(100))
    assert {AUTO["nesterov"], MEANS} <= set(ways_of(400))


def test_what_is_measured_is_not_measured_again() -> None:
    there = told(SHORT, losses(SHORT))
    assert study.missing(there, [SHORT], 1) == []
    del there[SHORT.name]["0"][MEANS]
    assert study.missing(there, [SHORT], 2) == [(SHORT, 0, [MEANS]), (SHORT, 1, [*WAYS, "together"])]


@pytest.mark.parametrize(("above", "near"), [(-0.03, False), (0.004, True), (0.02, True)])
def test_cells_near_a_bar_get_more_seeds(above: float, near: bool) -> None:
    for family in ("nesterov", "slow"):
        there = told(SHORT, {**losses(SHORT), AUTO["nesterov"]: 1.9, AUTO["slow"]: 1.9, AUTO[family]: 2.0 + above})
        assert bool(study.near(there, [SHORT])) is near
    assert study.near({}, [SHORT]) == []


def test_the_page_has_a_column_for_each_number_of_ranks() -> None:
    there = told(SHORT, {**losses(SHORT), "nesterov 0.7 0.3": 1.99}) | told(LONG, losses(LONG))
    assert page.table({"losses": there}).splitlines() == [
        "| rounds | weights | optimizer | 2 ranks | 8 ranks |",
        "|---|---|---|---|---|",
        "| 10 | new | Muon | +0.010, +0.000 (0.7, 0.3) |  |",
        "| 400 | trained | AdamW |  | +0.000, +0.000 (0.7, 0.5) |",
    ]


def test_all_ways_of_a_cell_begin_alike_and_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of equal pairs end with the same loss, whichever others are beside them."""
    letters = torch.arange(6000) % 11
    small = simulate.Text(corpus.Corpus("letters", letters[:5000], letters[5000:], "0"))
    monkeypatch.setattr(simulate, "text", lambda name: small)
    cell = Cell(2, 2, "scratch", "adamw", interval=4)
    found = simulate.run(cell, [WAYS[MEANS], WAYS["nesterov 0.7 0"], WAYS["slow 1 0.3"]], 0)
    alone = simulate.run(cell, [WAYS["nesterov 0.7 0"]], 0)
    assert alone["nesterov 0.7 0"] == pytest.approx(found["nesterov 0.7 0"], rel=1e-4)
    assert found[MEANS] < 4.85
    assert len(set(found.values())) == 3
