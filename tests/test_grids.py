"""Samples of products: what they cover, that all machines have the same ones, and that no test goes without where it is large."""

from __future__ import annotations

import inspect
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import conftest, grids
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


def file_of(**tests: list[pytest.MarkDecorator]) -> dict[str, grids.Product]:
    """The products of a file with tests that have some marks."""
    module = ModuleType("test_something")
    for name, marks in tests.items():

        def test(target: Any) -> None: ...

        if not name.endswith("_on_targets"):
            test.__signature__ = inspect.Signature()  # type: ignore[attr-defined]
        for mark in reversed(marks):
            mark(test)
        setattr(module, f"test_{name}", test)
    return {name: grids.products(module)[f"test_{name}"] for name in tests}


def cases(*marks: pytest.MarkDecorator) -> list[Any]:
    """The items of a test with some marks."""
    return file_of(one=list(marks))["one"].cases()


def items(*marks: pytest.MarkDecorator) -> list[tuple[object, ...]]:
    return [case.values for case in cases(*marks)]


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
    everything = cases(grid(where=where, **AXES))
    assert [case.values for case in everything] == full
    assert everything[0].id == "x-0-first-False"
    limited = items(grid(where=where, most=3, **AXES))
    assert set(sample) <= set(limited) < set(full)
    assert combinations(limited, 3) == combinations(full, 3)
    # What the default run leaves out is marked, so that another run can do the rest.
    assert [case.values for case in everything if not beyond(case)] == sample


def test_parameters_are_named() -> None:
    product = file_of(one=[grid(indirect=["e"], **AXES)])["one"]
    assert product.parameters == ["a", "b", "c", "d", "e"]
    assert product.indirect == ["e"]


def shared_file() -> dict[str, grids.Product]:
    every = grid(cover=1, name=["p", "q", "r", "s"])
    return file_of(
        first=[every], second=[every], third=[every, grid(cover=1, n=range(6))], pairs=[every, grid(n=[1, 2], b=[3, 4])]
    )


def test_grids_of_a_file_share_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "EVERYTHING", False)
    found = {name: [case.values for case in product.cases()] for name, product in shared_file().items()}
    assert all(found.values())
    assert {row[:2] for row in found["pairs"]} == {(1, 3), (1, 4), (2, 3), (2, 4)}
    assert {row[-1] for rows in found.values() for row in rows} == {"p", "q", "r", "s"}
    assert {row[0] for row in found["third"]} == set(range(6))
    assert sum(map(len, found.values())) == 1 + 1 + 6 + 4
    monkeypatch.setattr(grids, "EVERYTHING", True)
    everything = {name: product.cases() for name, product in shared_file().items()}
    assert {name: len(rows) for name, rows in everything.items()} == {"first": 4, "second": 4, "third": 24, "pairs": 16}
    for name, rows in everything.items():
        assert [case.values for case in rows if not beyond(case)] == found[name]


def test_each_target_has_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "TARGETS", {"quick": "q", "slow": "s"})
    monkeypatch.setattr(grids, "REFERENCES", {"slow"})
    monkeypatch.setattr(grids, "EVERYTHING", False)

    def file() -> dict[str, grids.Product]:
        return file_of(
            pairs_on_targets=[grid(a=range(4), b=range(4))], values_on_targets=[grid(cover=1, a=range(4), b=range(4))]
        )

    products = file()
    assert products["pairs_on_targets"].parameters == ["target", "a", "b"]
    assert products["pairs_on_targets"].indirect == ["target"]
    found = [case.values for case in products["pairs_on_targets"].cases()]
    assert sum(target == "q" for target, *_ in found) == 16
    rest = [row for target, *row in found if target == "s"]
    assert len(rest) == 4
    assert combinations(rest, 1) == {((column,), value) for column in range(2) for value in range(4)}
    for target in ("q", "s"):
        rows = [row for each, *row in (case.values for case in products["values_on_targets"].cases()) if each == target]
        assert len(rows) == 4
        assert combinations(rows, 1) == combinations(rest, 1)
    monkeypatch.setattr(grids, "EVERYTHING", True)
    counts = {
        (name, target): sum(case.values[0] == target for case in product.cases())
        for name, product in file().items()
        for target in ("q", "s")
    }
    assert [counts[name, "q"] for name in products] == [16, 16]
    # What is slow is compared on pairs where the test asks for pairs.
    assert counts["pairs_on_targets", "s"] == 16
    assert 4 <= counts["values_on_targets", "s"] <= 8


def test_slow_tests_take_no_part_in_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "EVERYTHING", False)
    every = grid(cover=1, name=["p", "q", "r"])
    found = file_of(slow=[pytest.mark.slow, every], quick=[every])
    assert len(found["slow"].cases()) == 1
    assert len(found["quick"].cases()) == 3
    monkeypatch.setattr(grids, "EVERYTHING", True)
    assert len(file_of(slow=[pytest.mark.slow, every])["slow"].cases()) == 3


def test_marked_values_are_in_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "EVERYTHING", False)
    slow = pytest.param(2, marks=pytest.mark.slow)
    assert items(grid(n=[1, slow])) == [(1,)]
    # A test has an item, which is left out by its mark.
    (only_one,) = cases(grid(n=[slow]))
    assert [mark.name for mark in only_one.marks] == ["slow"]


def test_names_of_values() -> None:
    assert grids.name_of((int, "a")) == "int-a"
    assert grids.name_of(object()) == "object"
    assert grids.name_of(b"x" * 100).startswith("bytes-")
    assert grids.name_of(b"x" * 100) != grids.name_of(b"y" * 100)


def test_axis_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="an axis has no values"):
        grid(a=[1], b=[])
    with pytest.raises(ValueError, match="no combination of a, b can be tested"):
        items(grid(a=[1], b=[2], where=lambda a, b: False))


def test_one_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["one", "two", "six", "three", "four", pytest.param("nine", id="9")]

    def word(case: object) -> str:
        return case if isinstance(case, str) else "nine"

    monkeypatch.setattr(grids, "EVERYTHING", False)
    assert one_of_each(words, lambda case: len(word(case))) == ["one", "three", "four"]
    monkeypatch.setattr(grids, "EVERYTHING", True)
    everything = one_of_each(words, lambda case: len(word(case)))
    assert [case for case in everything if isinstance(case, str)] == ["one", "three", "four"]
    assert [case.values[0] for case in everything if not isinstance(case, str)] == ["two", "six", "nine"]
    assert everything[-1].id == "9"


def test_axis_that_is_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["one", "two", "three"]
    monkeypatch.setattr(grids, "EVERYTHING", False)
    assert items(grid(word=one_of_each(words, len), n=[1, 2])) == [("one", 1), ("one", 2), ("three", 1), ("three", 2)]
    monkeypatch.setattr(grids, "EVERYTHING", True)
    everything = cases(grid(word=one_of_each(words, len), n=[1, 2]))
    assert [case.values for case in everything] == list(itertools.product(words, [1, 2]))
    assert {case.values[0] for case in everything if beyond(case)} == {"two"}


def test_only_keeps_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [("a", 1), ("a", 2), ("b", 1)]
    monkeypatch.setattr(grids, "EVERYTHING", False)
    assert only(pairs, ("a", 2)) == [("a", 2)]
    monkeypatch.setattr(grids, "EVERYTHING", True)
    everything = cases(grid(word__n=only(pairs, ("a", 2))))
    assert [case.values for case in everything] == pairs
    assert [bool(case.marks) for case in everything] == [True, False, True]
    with pytest.raises(ValueError, match=r"got \[\('c', 1\)\] to keep"):
        only(pairs, ("a", 2), ("c", 1))


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


def test_plain_products_are_small(request: pytest.FixtureRequest) -> None:
    """Of all tests that this run collects."""
    found: dict[str, int] = {}
    for item in request.session.items:
        found.setdefault(item.nodeid.partition("[")[0], grids.too_many(item.iter_markers("parametrize")))
    large = [f"{name} has {number} items" for name, number in found.items() if number]
    assert not large, f"more than {grids.MOST_PLAIN} items of plain parametrize; use grid or folded: " + "; ".join(
        large
    )


def test_plain_products_are_counted() -> None:
    def number(*marks: pytest.MarkDecorator) -> int:
        return grids.too_many(decorator.mark for decorator in marks)

    parametrize = pytest.mark.parametrize
    assert number(parametrize("a", range(8))) == 0
    assert number(parametrize("a", range(9))) == 9
    assert number(parametrize("a", range(3)), pytest.mark.slow, parametrize("b", argvalues="xyz")) == 9
    assert number(parametrize("a", [*range(8), pytest.param(8, marks=pytest.mark.slow)])) == 0


@folded(
    keyword__arguments__expected=[
        ("", ["tests"], False),
        ("", ["tests/x.py::test_y"], True),
        ("name", ["tests"], True),
        ("", ["tests/x.py", "tests/z.py"], False),
    ]
)
def test_who_names_tests_gets_all_of_their_items(keyword: str, arguments: list[str], expected: bool) -> None:
    config: Any = SimpleNamespace(option=SimpleNamespace(keyword=keyword), args=arguments)
    assert conftest.names_tests(config) == expected
