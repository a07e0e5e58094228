"""Tables on pages are those of committed results: `python -m bench.tables` writes them."""

from __future__ import annotations

import pytest

from bench import tables

pytestmark = pytest.mark.figures


@pytest.mark.parametrize("name", sorted(tables.TABLES))
def test_pages_have_the_tables_of_committed_results(name: str) -> None:
    path, text = tables.current(name)
    assert path.read_text() == text, "python -m bench.tables"


def test_a_table_has_one_place_on_its_page() -> None:
    text = "before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter\n"
    assert tables.rewritten(text, "a", "| new |") == text.replace("old", "| new |")
    for wrong in ("", text + text):
        with pytest.raises(ValueError, match="each once on the page"):
            tables.rewritten(wrong, "a", "")
