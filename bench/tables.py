"""Tables on pages, of committed results: `python -m bench.tables` writes them anew, `--check` names those that are out of date.

A page has its table between two lines, `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench.convergence.page
import bench.short_runs.page
import bench.track.page
import bench.tradeoff.page
import bench.winners.page

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True)
class Generated:
    """A table of a page.

    Attributes:
        page: relative to the repository.
        results: name of the file in `bench/results`, without its suffix.
        table: makes the table in Markdown of what is in the file.
    """

    page: str
    results: str
    table: Callable[[dict[str, Any]], str]


TABLES = {
    "models": Generated("docs/models.md", "models", bench.convergence.page.table),
    "models in time": Generated("docs/models.md", "models_tradeoff", bench.tradeoff.page.table),
    "short runs": Generated("docs/outer-steps.md", "short_runs", bench.short_runs.page.table),
    "track": Generated("docs/track.md", "track", bench.track.page.table),
    "winners": Generated("docs/choosing.md", "winners", bench.winners.page.table),
}


def rewritten(text: str, name: str, table: str) -> str:
    """Returns a page with a table in its place.

    Raises:
        ValueError: the page has not one place for it.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"expected a table between {begin} and {end}, each once on the page")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def current(name: str) -> tuple[Path, str]:
    """The page of a table, and what is to be on it."""
    found = TABLES[name]
    path = ROOT / found.page
    results = json.loads((RESULTS / f"{found.results}.json").read_text())
    return path, rewritten(path.read_text(), name, found.table(results))


def main() -> int:
    """Writes all tables, or names those that are out of date."""
    parser = argparse.ArgumentParser(prog="python -m bench.tables", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    status = 0
    for name in TABLES:
        path, text = current(name)
        if path.read_text() != text:
            print(f"{name}: {path.relative_to(ROOT)} {'is out of date' if options.check else 'is written'}")
            status = 1 if options.check else 0
            if not options.check:
                path.write_text(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
