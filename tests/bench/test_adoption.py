"""The committed table of programs that took an algorithm: ten of ten, of the programs as they are now."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from bench.adoption.edits import EDITS, MOST_LINES, PROGRAMS, changed_lines, program

ROWS = json.loads((Path(__file__).parents[2] / "bench/results/adoption.json").read_text())["programs"]


def test_every_program_changes_by_few_lines() -> None:
    assert {file.stem for file in PROGRAMS.glob("*.py")} == set(EDITS)
    assert len(EDITS) == 10
    for name in EDITS:
        before, after = program(name)
        compile(after, name, "exec")
        assert "bagua_kernels" not in before
        assert 1 <= changed_lines(before, after) <= MOST_LINES


def test_the_table_is_of_these_programs() -> None:
    """And each of them has run with equal bits on its ranks, and has sent at most half of DDP's bytes."""
    assert [row["name"] for row in ROWS] == list(EDITS)
    for row in ROWS:
        after = row["after"]
        assert row["program"] == hashlib.sha256(program(row["name"])[1].encode()).hexdigest()[:16]
        assert row["adopted"] is True
        assert after["equal_bits"] is True
        assert after["attempts"] == 1 + EDITS[row["name"]].restarts
        assert 0 < after["bytes_per_step"] <= 2 * after["elements"]


def test_changed_lines_are_counted_by_place() -> None:
    assert changed_lines("a\nb\nc\n", "a\nb\nc\n") == 0
    assert changed_lines("a\nb\nc\n", "a\nx\ny\nc\n") == 2
    assert changed_lines("a\nb\nc\n", "a\n\nc\n") == 1
