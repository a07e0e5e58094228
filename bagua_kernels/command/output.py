"""What a subcommand prints: a table, or JSON with the same values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_WIDEST = 10_000  # columns


def show_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the title, and one row for each mapping; its keys are the headings.

    A terminal wraps long texts. Elsewhere, as in a pipe, each row is one line.
    """
    click.echo(title)
    grid = Table()
    for key, value in rows[0].items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        grid.add_column(Text(key.replace("_", " ")), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(_text(value)) for value in row.values()))
    screen = Console()
    if not screen.is_terminal:
        screen = Console(width=Measurement.get(screen, screen.options.update(width=_WIDEST), grid).maximum)
    screen.print(grid)


def show_json(values: Mapping[str, Any]) -> None:
    """Prints values for programs."""
    click.echo(json.dumps(values, indent=1))


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
