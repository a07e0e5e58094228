"""Tables of pages, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table, one line for each row."""
    lines = [headings, *rows]
    shown = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([shown[0], "|" + "---|" * len(headings), *shown[1:]])
