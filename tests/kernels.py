"""The items of the default tier that compile kernels, listed in `kernels.txt`: a run begins with them, each worker with its own.

Two workers that need one kernel at a time would wait for each other's compilation. So items of one file, which share kernels, are
dealt to one worker, and all workers have about as many kernels. Everything else finds the kernels on disk.

`python -m pytest tests -n 0 --record-kernels` writes the list. Items that it lacks are run all the same, only later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

LIST = Path(__file__).with_name("kernels.txt")


def read(path: Path = LIST) -> dict[str, int]:
    """Returns how many kernels an item is the first to need, by the item's name."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: int(count) for count, name in (line.split(" ", 1) for line in lines)}


def write(found: Mapping[str, int], path: Path = LIST) -> None:
    """Writes what `read` returns, items without kernels left out."""
    path.write_text("".join(f"{count} {name}\n" for name, count in sorted(found.items()) if count))


def file_of(nodeid: str) -> str:
    """Returns the name of an item's file."""
    return nodeid.partition("::")[0]


def shares(found: Mapping[str, int], workers: int) -> list[list[str]]:
    """Deals items to workers: those of a file to one of them, with about as many kernels for each.

    Args:
        found: as from `read`.
        workers: their number.
    """
    files = Counter[str]()
    for name, count in found.items():
        files[file_of(name)] += count
    loads = [0] * workers
    owner: dict[str, int] = {}
    for file, count in files.most_common():
        owner[file] = loads.index(min(loads))
        loads[owner[file]] += count
    return [[name for name in found if owner[file_of(name)] == worker] for worker in range(workers)]


def first(names: Sequence[str], found: Mapping[str, int], workers: int) -> list[int]:
    """Returns the order of a run in which each worker begins with its share, and the others keep their order.

    pytest-xdist's `worksteal` gives each worker as many items that follow one another.

    Args:
        names: of all items, in the order that they have.
        found: as from `read`.
        workers: their number.
    """
    places = {name: place for place, name in enumerate(names)}
    dealt = [
        [places[name] for name in share] for share in shares({n: c for n, c in found.items() if n in places}, workers)
    ]
    taken = {place for share in dealt for place in share}
    others = [place for place in range(len(names)) if place not in taken]
    order: list[int] = []
    for worker, share in enumerate(dealt):
        size = (len(names) - len(order)) // (workers - worker)
        more = max(0, size - len(share))
        order += [*share, *others[:more]]
        others = others[more:]
    return [*order, *others]


def order(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts the items of a run of several workers; `tests/conftest.py` calls it."""
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers > 1:
        items[:] = [items[place] for place in first([item.nodeid for item in items], read(), workers)]


class Recorder:
    """The plugin of `--record-kernels`: counts the kernels that each item is the first of this process to load or compile."""

    def __init__(self) -> None:
        self.found = Counter[str]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Counts during an item."""
        with counting(self.found, item.nodeid):
            return (yield)

    def pytest_sessionfinish(self) -> None:
        """Writes the list."""
        write(self.found)


@contextmanager
def counting(found: Counter[str], name: str) -> Iterator[None]:
    """Adds one to a name's count for each kernel that this process needs for the first time."""
    from bagua_kernels.jit._numba_cpu_cache import KernelCache

    load = KernelCache.load_overload

    def counted(self: KernelCache, *arguments: object) -> object:
        found[name] += 1
        return load(self, *arguments)

    with mock.patch.object(KernelCache, "load_overload", counted):
        yield
