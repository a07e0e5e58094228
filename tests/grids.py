"""Products of test parameters: a covering sample by default, every combination with `--all`."""

from __future__ import annotations

import functools
import heapq
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from _pytest.mark.structures import ParameterSet

# True with `--all`: a grid is then its full product. Set by conftest.py before test files are imported.
EVERYTHING = False

Axis = Mapping[str, Any] | Iterable[Any]


def grid(
    *,
    where: Callable[..., bool] | None = None,
    cover: int = 2,
    most: int | None = None,
    indirect: Sequence[str] = (),
    **axes: Axis,
) -> pytest.MarkDecorator:
    """Parametrizes a test by a product of axes.

    By default, the items are a sample that has every pair of values of two axes that the full product has. The sample
    depends on nothing but the arguments. Its items have the marker `pair`, so that conftest.py leaves none of them out.
    With `--all`, the items are the full product; those outside the sample have the marker `beyond`.

    Args:
        where: returns True for a combination that can be tested, which it gets by name; by default each can.
        cover: the number of axes of which every combination of values is in the sample. With 1, each value is in it, which
            is enough where axes have nothing to do with each other; of these, conftest.py takes each value once in a file.
        most: with `--all`, as `cover` of another sample, in place of the full product; where an item takes seconds.
        indirect: the parameters that are passed to the fixture of their name, as for `pytest.mark.parametrize`.
        axes: the values of each parameter; a mapping gives their names in test ids, too. An axis called `a__b` sets the
            parameters `a` and `b` by tuples: `grid(a__b=[(1, 2), (3, 4)], c=[5, 6])`. Items with a value that has the mark `slow`
            or `beyond` (see `one_of_each`) keep it, and are not in the sample.
    """
    named = [_named(axis) for axis in axes.values()]
    rows = [
        row
        for row in itertools.product(*(range(len(axis)) for axis in named))
        if where is None or where(**_arguments(axes, named, row))
    ]
    default = set(covering([row for row in rows if not _left_out(named, row)], cover))
    paired = [pytest.mark.pair] * (cover > 1 and len(named) > 1)
    everything = set(rows) if most is None else default.union(covering(rows, most))
    cases = [
        pytest.param(
            *_arguments(axes, named, row).values(),
            id="-".join(axis[place].name for axis, place in zip(named, row, strict=True)),
            marks=[*_marks(named, row, row in default), *(paired if row in default else ())],
        )
        for row in rows
        if row in (everything if EVERYTHING else default)
    ]
    return pytest.mark.parametrize(_parameters(axes), cases, indirect=indirect)


def folded(**axes: Axis) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test for every combination of some parameters, all in one item; a note on a failure names the combination.

    For checks of milliseconds, of which the items would cost more than what they do.
    """
    named = [_named(axis) for axis in axes.values()]
    rows = list(itertools.product(*(range(len(axis)) for axis in named)))

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def loop(*itself: Any, **fixtures: Any) -> None:
            for row in rows:
                try:
                    test(*itself, **fixtures, **_arguments(axes, named, row))
                except Exception as error:
                    names = (axis[place].name for axis, place in zip(named, row, strict=True))
                    error.add_note(
                        "with " + ", ".join(f"{axis}={name}" for axis, name in zip(axes, names, strict=True))
                    )
                    raise

        signature = inspect.signature(test)
        others = [p for name, p in signature.parameters.items() if name not in _parameters(axes)]
        loop.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return loop

    return decorate


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
        cases: values of a parameter, or of several as tuples or `pytest.param`.
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


def only(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Returns the cases of a list, all but those kept marked so that they run with `--all` only.

    For tests whose subject is not what the cases are, so that a few will do.
    """
    cases = list(cases)
    missing = [case for case in kept if case not in cases]
    if missing:
        raise ValueError(f"got {missing!r} to keep, expected some of {cases!r}")
    return [case if case in kept else _beyond(case) for case in cases if EVERYTHING or case in kept]


def _beyond(case: Any) -> Any:
    if isinstance(case, ParameterSet):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.beyond])
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.beyond)


class _Value(NamedTuple):
    """A value of an axis, what test ids call it, and the marks of items that have it."""

    name: str
    value: Any
    marks: tuple[Any, ...] = ()


def _named(axis: Axis) -> list[_Value]:
    if isinstance(axis, Mapping):
        named = [_Value(name, value) for name, value in axis.items()]
    else:
        named = [_value(value) for value in axis]
    if not named:
        raise ValueError("an axis has no values, so that its test would have no items")
    return named


def _value(value: Any) -> _Value:
    if not isinstance(value, ParameterSet):
        return _Value(name_of(value), value)
    own = value.values[0] if len(value.values) == 1 else value.values
    return _Value(str(value.id or name_of(own)), own, tuple(value.marks))


def name_of(value: Any) -> str:
    """Returns what a test id calls a value: the name of a class, a function or a dtype, else its text."""
    if isinstance(value, tuple):
        return "-".join(map(name_of, value))
    return str(getattr(value, "__name__", value)).removeprefix("torch.")


def _left_out(named: Sequence[list[_Value]], row: tuple[int, ...]) -> bool:
    """True if a value of the row has a mark that keeps it out of the default tier."""
    return any(
        mark.name in ("slow", "beyond") for axis, place in zip(named, row, strict=True) for mark in axis[place].marks
    )


def _marks(named: Sequence[list[_Value]], row: tuple[int, ...], default: bool) -> list[Any]:
    """Returns the marks of an item: those of its values, and `beyond` if only that keeps it out of the default tier."""
    marks = [mark for axis, place in zip(named, row, strict=True) for mark in axis[place].marks]
    return marks if default or _left_out(named, row) else [*marks, pytest.mark.beyond]


def _parameters(axes: Iterable[str]) -> list[str]:
    return [name for names in axes for name in names.split("__")]


def _arguments(axes: Mapping[str, Axis], named: Sequence[list[_Value]], row: tuple[int, ...]) -> dict[str, Any]:
    """The test's arguments for a row of places in the axes."""
    found: dict[str, Any] = {}
    for names, axis, place in zip(axes, named, row, strict=True):
        split = names.split("__")
        found.update(zip(split, axis[place].value if len(split) > 1 else (axis[place].value,), strict=True))
    return found
