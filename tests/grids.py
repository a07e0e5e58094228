"""Products of test parameters: a covering sample by default, every combination with `--all`."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet

# True with `--all`: a grid is then its full product. Set by conftest.py before test files are imported.
EVERYTHING = False

Axis = Mapping[str, Any] | Iterable[Any]


def grid(
    *, where: Callable[..., bool] | None = None, cover: int = 2, indirect: Sequence[str] = (), **axes: Axis
) -> pytest.MarkDecorator:
    """Parametrizes a test by a product of axes.

    By default, the items are a sample that has every pair of values of two axes that the full product has. The sample
    depends on nothing but the arguments. With `--all`, the items are the full product; those outside the sample have the
    marker `beyond`.

    Args:
        where: returns True for a combination that can be tested, which it gets by name; by default each can.
        cover: the number of axes of which every combination of values is in the sample. With 1, each value is in it, which
            is enough where axes have nothing to do with each other.
        indirect: the parameters that are passed to the fixture of their name, as for `pytest.mark.parametrize`.
        axes: the values of each parameter; a mapping gives their names in test ids, too. An axis called `"a,b"` sets several
            parameters by tuples: `grid(**{"a,b": {"first": (1, 2)}}, c=[3, 4])`.
    """
    named = [_named(axis) for axis in axes.values()]
    rows = [
        row
        for row in itertools.product(*(range(len(axis)) for axis in named))
        if where is None or where(**_arguments(axes, named, row))
    ]
    default = set(covering(rows, cover))
    cases = [
        pytest.param(
            *_arguments(axes, named, row).values(),
            id="-".join(named[axis][place][0] for axis, place in enumerate(row)),
            marks=[] if row in default else pytest.mark.beyond,
        )
        for row in rows
        if EVERYTHING or row in default
    ]
    return pytest.mark.parametrize(",".join(axes).split(","), cases, indirect=indirect)


def covering(rows: Sequence[tuple[Any, ...]], cover: int = 2) -> list[tuple[Any, ...]]:
    """Returns some of the rows, in their order, that have every combination of `cover` columns' values that all rows have."""
    if not rows:
        return []
    chosen = list(itertools.combinations(range(len(rows[0])), min(cover, len(rows[0]))))
    return [
        rows[place] for place in sample([{(columns, *(row[c] for c in columns)) for columns in chosen} for row in rows])
    ]


def sample(parts: Sequence[set[Any]]) -> list[int]:
    """Returns the places of some of the sets, in order, which together have every element.

    The set with most elements that none before it has is taken next, of several the first.
    """
    missing = [set(elements) for elements in parts]
    covered: set[Any] = set()
    # A set's gain only falls, so that a gain which is still true when it comes out first is the largest.
    queue = [(-len(elements), place) for place, elements in enumerate(missing)]
    heapq.heapify(queue)
    taken = []
    while queue:
        old, place = heapq.heappop(queue)
        missing[place] -= covered
        gain = -len(missing[place])
        if gain and gain == old:
            taken.append(place)
            covered |= missing[place]
        elif gain:
            heapq.heappush(queue, (gain, place))
    return sorted(taken)


def one_of_each(cases: Iterable[Any], *keys: Callable[[Any], Any], cover: int = 2) -> list[Any]:
    """Returns the cases of a list, those outside a sample marked so that they run with `--all` only.

    Args:
        cases: the parameters of a test, or of several as `pytest.param`.
        keys: each returns a property of a case, which can be hashed; the sample has every combination of `cover` of them.
        cover: as for `grid`.
    """
    cases = list(cases)
    labels = [tuple(key(case) for key in keys) for case in cases]
    first = {label: place for place, label in reversed(list(enumerate(labels)))}
    default = {first[label] for label in covering(sorted(first, key=first.__getitem__), cover)}
    return [
        case if place in default else _beyond(case)
        for place, case in enumerate(cases)
        if EVERYTHING or place in default
    ]


def _beyond(case: Any) -> Any:
    if isinstance(case, ParameterSet):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.beyond])
    return pytest.param(case, marks=pytest.mark.beyond)


def _named(axis: Axis) -> list[tuple[str, Any]]:
    pairs = list(axis.items()) if isinstance(axis, Mapping) else [(name_of(value), value) for value in axis]
    if not pairs:
        raise ValueError("an axis has no values, so that its test would have no items")
    return pairs


def name_of(value: Any) -> str:
    """Returns what a test id calls a value: `float16` for a dtype, the name of a class or a function, else its text."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(getattr(value, "__name__", value))


def _arguments(
    axes: Mapping[str, Axis], named: Sequence[list[tuple[str, Any]]], row: tuple[int, ...]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for axis, (names, place) in enumerate(zip(axes, row, strict=True)):
        value = named[axis][place][1]
        split = names.split(",")
        found.update(zip(split, value if len(split) > 1 else (value,), strict=True))
    return found
