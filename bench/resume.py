"""Studies that go on where they were killed: each result is in the file as soon as it is measured."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

Results = dict[str, Any]
# A name, and a function that measures and adds to the results.
Missing = tuple[str, Callable[[], None]]


def read(path: Path | None) -> Results:
    """Returns what is in a file, nothing where it is not there."""
    if path is None or not path.exists():
        return {}
    found: Results = json.loads(path.read_text())
    return found


def begun(found: Results, settings: Results, path: Path | None, empty: Results) -> Results:
    """Returns what earlier runs with the same settings have found, or a new study.

    Args:
        found: what is in the file of the study; nothing for a new one.
        settings: values as JSON holds them.
        path: of the file, for errors.
        empty: what a new study has beside its settings.

    Raises:
        ValueError: the file holds a study with other settings, which would be lost.
    """
    if not found:
        return {"settings": settings, **empty}
    if found.get("settings") != settings:
        raise ValueError(f"{path} holds another study, with {found.get('settings')}: name another file, or remove it")
    return found


def write(path: Path | None, results: Results) -> None:
    """Writes everything, whole or not at all: a study may be killed at any time."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(results, indent=1) + "\n")
        os.replace(new, path)


def study(
    results: Results,
    missing: Sequence[Missing],
    path: Path | None,
    progress: Progress,
    only: Callable[[str], bool] = lambda name: True,
) -> None:
    """Measures what is missing, and writes each result at once.

    Args:
        results: of the whole file, to which each measurement adds.
        missing: what is to be measured.
        path: of the file.
        progress: shows the name of what is under way.
        only: True for the names that are measured; the others are passed over.
    """
    bar = progress.add_task("", total=len(missing))
    for name, measure in missing:
        progress.update(bar, description=name)
        if only(name):
            measure()
            write(path, results)
        progress.advance(bar)
