"""Products of test parameters: a covering sample by default, every combination with `--all`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import heapq
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from _pytest.mark.structures import ParameterSet

# True where grids are full products: with `--all`, where tests are named, and on a GPU. conftest.py sets it before test
# files are imported.
EVERYTHING = False
# What a test with the fixture `target` runs on, by name. conftest.py sets them, too.
TARGETS: dict[str, Any] = {}
# Those of them that are checked on fewer combinations: slow ones that other tests compare with the rest.
REFERENCES: set[str] = set()
# More combinations than these are a grid, or one item that loops.
MOST_PLAIN = 8
# Characters of a value's text in a test id, where a longer one has a digest.
LONGEST_NAME = 80

Axis = Mapping[str, Any] | Iterable[Any]
Row = tuple[int, ...]


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
    depends on nothing but the test file. With `--all`, the items are the full product; those outside the sample have the
    marker `beyond`. Several grids of one test are multiplied.

    Args:
        where: returns True for a combination that can be tested, which it gets by name; by default each can.
        cover: the number of axes of which every combination of values is in the sample. With 1, all grids of the file
            with `cover=1` share a sample, which has each of their tests, and each value of each of their parameters.
        most: with `--all`, as `cover` of another sample, in place of the full product; where an item takes seconds.
        indirect: the parameters that are passed to the fixture of their name, as for `pytest.mark.parametrize`.
        axes: the values of each parameter; a mapping gives their names in test ids, too. An axis called `a__b` sets the
            parameters `a` and `b` by tuples: `grid(a__b=[(1, 2), (3, 4)], c=[5, 6])`. Items with a value that has the mark `slow`
            or `beyond` (see `one_of_each`) keep it, and are not in the sample.
    """
    named = {names: _named(axis) for names, axis in axes.items()}
    return pytest.mark.grid(_Grid(named, where, cover, most, tuple(indirect)))


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
                names = (axis[place].name for axis, place in zip(named, row, strict=True))
                with noted(", ".join(f"{axis}={name}" for axis, name in zip(axes, names, strict=True))):
                    test(*itself, **fixtures, **_arguments(axes, named, row))

        signature = inspect.signature(test)
        others = [p for name, p in signature.parameters.items() if name not in _parameters(axes)]
        loop.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return loop

    return decorate


@contextlib.contextmanager
def noted(combination: str) -> Iterator[None]:
    """Adds a note to a failure that names the combination."""
    try:
        yield
    except Exception as error:
        error.add_note(f"with {combination}")
        raise


def covering(rows: Sequence[tuple[Any, ...]], cover: int = 2) -> list[tuple[Any, ...]]:
    """Returns some of the rows, in their order, that have every combination of `cover` columns' values that all rows have."""
    return [rows[place] for place in sample([_combinations(row, cover) for row in rows])]


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
        cover: the number of keys, as for `grid` the number of axes.
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


def generate(metafunc: pytest.Metafunc) -> None:
    """Makes the items of a test from its grids, each on one target if the test has the fixture `target`."""
    product = products(metafunc.module)[_key(metafunc.cls, metafunc.definition.originalname)]
    if product.grids:
        metafunc.parametrize(product.parameters, product.cases(), indirect=product.indirect)
    if "target" in metafunc.fixturenames and "target" not in product.parameters:
        metafunc.parametrize("target", TARGETS.values(), ids=TARGETS.keys(), indirect=True)


def too_many(marks: Iterable[pytest.Mark]) -> int:
    """Returns the number of combinations in the default tier of a test's plain `parametrize`, or 0 if it is small enough."""
    number = 1
    for mark in marks:
        if mark.name == "parametrize":
            values = mark.kwargs["argvalues"] if "argvalues" in mark.kwargs else mark.args[1]
            number *= sum(not _keeps_out(getattr(value, "marks", ())) for value in values)
    return number if number > MOST_PLAIN else 0


class _Value(NamedTuple):
    """A value of an axis, its name in test ids, and the marks of items that have it."""

    name: str
    value: Any
    marks: tuple[Any, ...] = ()


class _Grid(NamedTuple):
    """The arguments of `grid`."""

    axes: Mapping[str, list[_Value]]
    where: Callable[..., bool] | None = None
    cover: int = 2
    most: int | None = None
    indirect: tuple[str, ...] = ()

    def rows(self) -> list[Row]:
        """Every combination that can be tested, as places in the axes."""
        found = [
            row
            for row in itertools.product(*(range(len(axis)) for axis in self.axes.values()))
            if self.where is None or self.where(**self.arguments(row))
        ]
        if not found:
            raise ValueError(f"no combination of {', '.join(self.axes)} can be tested")
        return found

    def arguments(self, row: Row) -> dict[str, Any]:
        return _arguments(self.axes, list(self.axes.values()), row)


class _Item(NamedTuple):
    """A combination of a test's parameters: the name of a target, or "" if the test has none, and places in the axes."""

    target: str
    row: Row


class Product:
    """The items of a test: all combinations of its targets and its grids.

    Attributes:
        default: the items of the default tier. `products` sets it.
    """

    def __init__(self, name: str, targets: Sequence[str], grids: Sequence[_Grid], out: bool) -> None:
        self.name, self.targets, self.grids, self.out = name, targets, grids, out
        self.axes = [(names, axis) for each in grids for names, axis in each.axes.items()]
        self.rows = [tuple(itertools.chain(*rows)) for rows in itertools.product(*(each.rows() for each in grids))]
        self.parameters = ["target"] * bool(targets) + _parameters(names for names, _ in self.axes)
        self.indirect = ["target"] * bool(targets) + [name for each in grids for name in each.indirect]
        # Texts of values take long, and each is in many rows.
        self._texts = [[_texts(names, value) for value in axis] for names, axis in self.axes]
        self.default: set[_Item] = set()

    @property
    def shares(self) -> bool:
        """True if the sample is shared with other tests of the file."""
        return any(each.cover == 1 for each in self.grids)

    def candidates(self) -> list[_Item]:
        """The items of which the default tier has some."""
        rows = [row for row in self.rows if not self.out and not _keeps_out(self._marks(row))]
        return [_Item(target, row) for target in self.targets or [""] for row in rows]

    def own_sample(self) -> list[_Item]:
        """The items of the default tier, if the sample is the test's own: references have each value."""
        found = []
        for target in self.targets or [""]:
            items = [item for item in self.candidates() if item.target == target]
            most = 1 if target in REFERENCES else None
            found += [items[place] for place in sample([self.elements(item, most) for item in items])]
        return found

    def elements(self, item: _Item, most: int | None = None) -> set[Any]:
        """What a sample of the item's target needs no other item for: combinations of values, of at most `most` axes."""
        found: set[Any] = {(item.target, self.name)}
        begin = 0
        for number, each in enumerate(self.grids):
            end = begin + len(each.axes)
            if each.cover == 1:
                for axis in range(begin, end):
                    found.update((item.target, *text) for text in self._texts[axis][item.row[axis]])
            else:
                cover = min(each.cover, most or each.cover)
                found.update((self.name, number, *some) for some in _combinations(item.row[begin:end], cover))
            begin = end
        return found

    def order(self, item: _Item) -> bytes:
        """Sorts items so that not all tests get the first values, and so that all processes have the same order."""
        return hashlib.sha256(f"{self.name}[{self._id(item)}]".encode()).digest()

    def cases(self) -> list[ParameterSet]:
        """The items of this run's tier."""
        if EVERYTHING:
            allowed = {target: self._everything(target) for target in self.targets or [""]}
            items = [_Item(target, row) for target in allowed for row in self.rows]
            return [self._case(item) for item in items if item in self.default or item.row in allowed[item.target]]
        # What is left out by a mark of its own is an item all the same: pytest has no test without one.
        items = [_Item(target, row) for target in self.targets or [""] for row in self.rows]
        return [self._case(item) for item in items if item in self.default] or [self._case(items[0])]

    def _everything(self, target: str) -> set[Row]:
        """The rows of a target with `--all`, beside those of the default tier."""
        if target in REFERENCES:
            return {self.rows[place] for place in sample([self.elements(_Item(target, row)) for row in self.rows])}
        parts, begin = [], 0
        for each in self.grids:
            end = begin + len(each.axes)
            given = {item.row[begin:end] for item in self.default if item.target == target}
            parts.append(_completed(each.rows(), given, each.most) if each.most else each.rows())
            begin = end
        return {tuple(itertools.chain(*rows)) for rows in itertools.product(*parts)}

    def _case(self, item: _Item) -> ParameterSet:
        values = [TARGETS[item.target]] if item.target else []
        values += _arguments([names for names, _ in self.axes], [axis for _, axis in self.axes], item.row).values()
        marks = self._marks(item.row)
        if item not in self.default and not _keeps_out(marks) and not self.out:
            marks.append(pytest.mark.beyond)
        return pytest.param(*values, id=self._id(item), marks=marks)

    def _id(self, item: _Item) -> str:
        values = [axis[place].name for (_, axis), place in zip(self.axes, item.row, strict=True)]
        return "-".join([*([item.target] if item.target else []), *values])

    def _marks(self, row: Row) -> list[Any]:
        return [mark for (_, axis), place in zip(self.axes, row, strict=True) for mark in axis[place].marks]


@functools.cache
def products(module: ModuleType) -> dict[str, Product]:
    """Returns the products of all tests of a file, by key, with the items of the default tier."""
    products = {}
    for cls, name, function in _tests(module):
        marks = list(_marks_of(module, cls, function))
        grids = [mark.args[0] for mark in marks if mark.name == "grid"]
        targets = list(TARGETS) if grids and "target" in inspect.signature(function).parameters else []
        products[_key(cls, name)] = Product(_key(cls, name), targets, grids, _keeps_out(marks))
    for product in products.values():
        if not product.shares:
            product.default.update(product.own_sample())
    together = [(product, item) for product in products.values() if product.shares for item in product.candidates()]
    together.sort(key=lambda both: both[0].order(both[1]))
    for place in sample([product.elements(item) for product, item in together]):
        product, item = together[place]
        product.default.add(item)
    return products


def _tests(module: ModuleType) -> Iterator[tuple[type | None, str, Any]]:
    """Yields the tests that pytest collects from a file: their class, their name and the function."""
    for name, found in vars(module).items():
        if inspect.isfunction(found) and name.startswith("test"):
            yield None, name, found
        elif inspect.isclass(found) and name.startswith("Test"):
            for method, function in inspect.getmembers(found, inspect.isfunction):
                if method.startswith("test"):
                    yield found, method, function


def _key(cls: type | None, name: str) -> str:
    return f"{cls.__name__}::{name}" if cls else name


def _marks_of(module: ModuleType, cls: type | None, function: Any) -> Iterator[pytest.Mark]:
    holders = [module, *reversed(cls.__mro__ if cls else ()), function]
    for holder in holders:
        found = vars(holder).get("pytestmark", [])
        for mark in found if isinstance(found, list) else [found]:
            yield getattr(mark, "mark", mark)


def _combinations(row: Sequence[Any], cover: int) -> set[Any]:
    """Every combination of `cover` columns with the row's values there."""
    chosen = itertools.combinations(range(len(row)), min(cover, len(row)))
    return {(columns, *(row[column] for column in columns)) for columns in chosen}


def _completed(rows: Sequence[Row], given: set[Row], cover: int) -> list[Row]:
    """Returns the given rows and as many others as are needed to have every combination of `cover` columns' values."""
    there = set[Any]().union(*(_combinations(row, cover) for row in given))
    places = sample([_combinations(row, cover) - there for row in rows])
    return [row for place, row in enumerate(rows) if place in places or row in given]


def _keeps_out(marks: Iterable[Any]) -> bool:
    """True if a mark keeps an item out of the default tier."""
    return any(mark.name in ("slow", "beyond") for mark in marks)


def _beyond(case: Any) -> Any:
    if isinstance(case, ParameterSet):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.beyond])
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.beyond)


def _named(axis: Axis) -> list[_Value]:
    if isinstance(axis, Mapping):
        named = [_Value(name, value) for name, value in axis.items()]
    else:
        named = [_value(value) for value in axis]
    if not named:
        raise ValueError("an axis has no values, so that its test would have no items")
    # Pytest would number equal names of a tier's items, so that an item had different names in different tiers.
    seen: Counter[str] = Counter()
    for place, value in enumerate(named):
        seen[value.name] += 1
        if seen[value.name] > 1:
            named[place] = value._replace(name=f"{value.name}{seen[value.name]}")
    return named


def _value(value: Any) -> _Value:
    if not isinstance(value, ParameterSet):
        return _Value(name_of(value), value)
    own = value.values[0] if len(value.values) == 1 else value.values
    return _Value(str(value.id or name_of(own)), own, tuple(value.marks))


def name_of(value: Any) -> str:
    """Returns what a test id calls a value: the name of a class, a function or a dtype, else its text if it is short."""
    if isinstance(value, tuple):
        return "-".join(map(name_of, value))
    text = str(getattr(value, "__name__", value)).removeprefix("torch.")
    if " at 0x" in text:
        # An address differs between processes.
        return type(value).__name__
    if len(text) <= LONGEST_NAME and "\n" not in text:
        return text
    return f"{type(value).__name__}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def _texts(names: str, value: _Value) -> list[tuple[str, str]]:
    """Returns each parameter that a value of an axis sets, with a text that differs if the parameter's value does."""
    split = names.split("__")
    values = value.value if len(split) > 1 else (value.value,)
    return [(name, repr(each)) for name, each in zip(split, values, strict=True)]


def _parameters(axes: Iterable[str]) -> list[str]:
    return [name for names in axes for name in names.split("__")]


def _arguments(axes: Iterable[str], named: Sequence[list[_Value]], row: Row) -> dict[str, Any]:
    """The test's arguments for a row of places in the axes."""
    found: dict[str, Any] = {}
    for names, axis, place in zip(axes, named, row, strict=True):
        split = names.split("__")
        found.update(zip(split, axis[place].value if len(split) > 1 else (axis[place].value,), strict=True))
    return found
