"""Runs that end at a time: pytest's options `--seed`, `--until` and `--end`.

With `--seed` the items run in the order of the hashes of the seed and their names. A run that ends early has then run a sample
of its items, which another seed changes.

No item begins after `--until`. An item that began before may run up to its own limit. An item marked `slow` also does not begin
in the last `LAST_OF_SLOW` seconds before `--end`, which is the end of everything. Both are seconds since 1970, so that several
runs share one end. Items that did not begin are not reported: neither as failed nor as skipped. The last lines of the run count
them, and they do not change its exit status.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterable

import pytest

# Slow items mostly take one to five minutes.
LAST_OF_SLOW = 300.0
# Lines of the list of files at the end of a run.
MOST_LINES = 40


def add_options(parser: pytest.Parser) -> None:
    """Adds the options; `tests/conftest.py` calls it."""
    group = parser.getgroup("runs that end at a time")
    group.addoption("--seed", metavar="HEX", help="order items by the hashes of this text and their names")
    group.addoption("--until", metavar="TIME", type=float, help="seconds since 1970 after which no item begins")
    group.addoption(
        "--end", metavar="TIME", type=float, help=f"no slow item begins less than {LAST_OF_SLOW:g} s before this time"
    )


def configure(config: pytest.Config) -> None:
    """Registers the plugin if a run has an end; `tests/conftest.py` calls it."""
    until, end = config.getoption("--until"), config.getoption("--end")
    if until is not None or end is not None:
        config.pluginmanager.register(Deadline(until, end), "deadline")


def order(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts items by their hashes if the run has a seed. Pytest then moves together what shares a fixture's parameter."""
    seed = config.getoption("--seed")
    if seed is not None:
        items.sort(key=lambda item: place(seed, item.nodeid))


def place(seed: str, nodeid: str) -> bytes:
    """Returns the hash by which an item is ordered: the same in each process and on each machine."""
    return hashlib.sha256(f"{seed} {nodeid}".encode()).digest()


def function_of(nodeid: str) -> str:
    """Returns the name of an item's function, without its parameters."""
    return nodeid.partition("[")[0]


class Deadline:
    """The plugin: in each worker it decides which items begin, and in the process that started them it counts the others.

    Attributes:
        until: seconds since 1970 after which no item begins; None if there is no such time.
        end: seconds since 1970 by which all items are meant to have ended; None if there is no such time.
        selected: names of the items of the run.
        begun: names of the items that have begun.
    """

    def __init__(self, until: float | None, end: float | None) -> None:
        self.until = until
        self.end = end
        self.selected: set[str] = set()
        self.begun: set[str] = set()

    def leaves_out(self, item: pytest.Item, now: float) -> bool:
        """True if an item does not begin at a time."""
        if self.until is not None and now >= self.until:
            return True
        if self.end is None:
            return False
        return now >= self.end - (LAST_OF_SLOW if item.get_closest_marker("slow") else 0.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Ends the protocol of an item that does not begin: without a report no process counts it."""
        if not self.leaves_out(item, time.time()):
            return None
        # The item before has left standing what this one shares with it. Another file's item may be next.
        item.session._setupstate.teardown_exact(nextitem)
        return True

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Stores the items of a run without workers, and of a worker, where nothing reads them."""
        self.selected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        """Stores the items that a worker has collected; all workers collect the same ones."""
        self.selected.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Stores the name of an item that has begun; reports of workers arrive here, too."""
        self.begun.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints how many items were left out, and of which functions no item began."""
        for line in summary(self.selected, self.begun):
            terminalreporter.write_line(line)


def summary(selected: set[str], begun: set[str]) -> list[str]:
    """Returns the lines about items that did not begin: none if all did.

    Args:
        selected: names of all items of the run.
        begun: names of those that have begun.
    """
    left = selected - begun
    if not left:
        return []
    functions = {function_of(item) for item in left} - {function_of(item) for item in begun}
    lines = [f"the time was up: {len(left)} of {len(selected)} items were left out"]
    if not functions:
        return [*lines, "each function had an item that ran"]
    files = Counter(function.partition("::")[0] for function in functions)
    rows = [f"{count:5} {file}" for file, count in sorted(files.items(), key=lambda row: (-row[1], row[0]))]
    lines.append(f"{len(functions)} functions had no item that ran; in each file:")
    if len(rows) > MOST_LINES:
        others = sum(sorted(files.values(), reverse=True)[MOST_LINES - 1 :])
        rows = [*rows[: MOST_LINES - 1], f"{others:5} in {len(files) - MOST_LINES + 1} other files"]
    return [*lines, *rows]
