"""Samples of products: what they cover, and that all machines have the same ones."""

from __future__ import annotations

import inspect
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import grids
from tests.grids import covering, folded, grid, one_of_each, only

ROOT = Path(__file__).parents[1]
AXES = {"a": ["x", "y", "z"], "b": range(5), "c__d": {"first": (1, 2), "second": (3, 4)}, "e": [False, True]}


def combinations(rows: list[tuple[object, ...]], cover: int) -> set[tuple[object, ...]]:
    """Every combination of values of `cover` columns that a row has."""
    return {
        (columns, *(row[c] for c in columns))
        for row in rows
        for columns in itertools.combinations(range(len(row)), cover)
    }


def beyond(case: Any) -> bool:
    return any(mark.name == "beyond" for mark in case.marks)


def items(mark: pytest.MarkDecorator) -> list[tuple[object, ...]]:
    return [case.values for case in mark.args[1]]


@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    cover=st.integers(1, 3),
    infeasible=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), max_size=6),
)
def test_sample_has_what_the_product_has(sizes: list[int], cover: int, infeasible: list[list[int]]) -> None:
    product = [row for row in itertools.product(*map(range, sizes)) if list(row[:2]) not in infeasible]
    sample = covering(product, cover)
    within = min(cover, len(sizes))
    assert combinations(sample, within) == combinations(product, within)
    assert sample == [row for row in product if row in set(sample)]
    # No row could be left out without a combination being lost by chance alone: each brings at least one of its own.
    assert len(sample) <= len(combinations(product, within))


def test_pairs_of_many_axes_need_few_rows() -> None:
    product = list(itertools.product(range(5), repeat=4))
    assert len(covering(product, 1)) == 5
    assert 25 <= len(covering(product)) < 50
    assert covering(product, 4) == product


def test_default_and_full_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    def where(a: str, b: int, c: int, d: int, e: bool) -> bool:
        return not (a == "x" and b == 3) and d == c + 1

    full = [
        (a, b, *pair, e)
        for a, b, pair, e in itertools.product(AXES["a"], AXES["b"], [(1, 2), (3, 4)], AXES["e"])
        if where(a, b, *pair, e)
    ]
    monkeypatch.setattr(grids, "EVERYTHING", False)
    sample = items(grid(where=where, **AXES))
    assert len(sample) < len(full)
    assert combinations(sample, 2) == combinations(full, 2)
    monkeypatch.setattr(grids, "EVERYTHING", True)
    everything = grid(where=where, **AXES)
    assert everything.args[0] == ["a", "b", "c", "d", "e"]
    assert items(everything) == full
    assert everything.args[1][0].id == "x-0-first-False"
    limited = items(grid(where=where, most=3, **AXES))
    assert set(sample) <= set(limited) < set(full)
    assert combinations(limited, 3) == combinations(full, 3)
    # What the default run leaves out is marked, so that another run can do the rest.
    assert [case.values for case in everything.args[1] if not beyond(case)] == sample


def test_axis_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="an axis has no values"):
        grid(a=[1], b=[])


def test_one_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = ["one", "two", "six", "three", "four", pytest.param("nine", id="9")]

    def word(case: object) -> str:
        return case if isinstance(case, str) else "nine"

    monkeypatch.setattr(grids, "EVERYTHING", False)
    assert one_of_each(cases, lambda case: len(word(case))) == ["one", "three", "four"]
    monkeypatch.setattr(grids, "EVERYTHING", True)
    everything = one_of_each(cases, lambda case: len(word(case)))
    assert [case for case in everything if isinstance(case, str)] == ["one", "three", "four"]
    assert [case.values[0] for case in everything if not isinstance(case, str)] == ["two", "six", "nine"]
    assert everything[-1].id == "9"


def test_axis_that_is_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["one", "two", "three"]
    monkeypatch.setattr(grids, "EVERYTHING", False)
    assert items(grid(word=one_of_each(words, len), n=[1, 2])) == [("one", 1), ("one", 2), ("three", 1), ("three", 2)]
    monkeypatch.setattr(grids, "EVERYTHING", True)
    everything = grid(word=one_of_each(words, len), n=[1, 2])
    assert items(everything) == list(itertools.product(words, [1, 2]))
    assert {case.values[0] for case in everything.args[1] if beyond(case)} == {"two"}


def test_only_keeps_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [("a", 1), ("a", 2), ("b", 1)]
    monkeypatch.setattr(grids, "EVERYTHING", False)
    assert only(cases, ("a", 2)) == [("a", 2)]
    monkeypatch.setattr(grids, "EVERYTHING", True)
    everything = grid(word__n=only(cases, ("a", 2)))
    assert items(everything) == cases
    assert [bool(case.marks) for case in everything.args[1]] == [True, False, True]
    with pytest.raises(ValueError, match=r"got \[\('c', 1\)\] to keep"):
        only(cases, ("a", 2), ("c", 1))


def test_folded_runs_all_and_names_what_fails() -> None:
    seen = []

    @folded(a=[1, 2], b={"x": 3, "y": 4})
    def check(fixture: int, a: int, b: int) -> None:
        seen.append((fixture, a, b))
        assert (a, b) != (2, 4)

    assert list(inspect.signature(check).parameters) == ["fixture"]
    with pytest.raises(AssertionError) as caught:
        check(fixture=7)
    assert caught.value.__notes__ == ["with a=2, b=y"]
    assert seen == [(7, 1, 3), (7, 1, 4), (7, 2, 3), (7, 2, 4)]


def test_samples_do_not_depend_on_the_process() -> None:
    script = (
        "from tests.grids import covering; import itertools;"
        "print(covering(list(itertools.product(['a', 'b', 'c'], ['d', 'e'], ['f', 'g', 'h', 'i'], [True, False]))))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(found) == 1
