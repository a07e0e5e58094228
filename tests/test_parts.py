"""Parts of a run have each item once, and are the same in all processes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import parts

ROOT = Path(__file__).parents[1]
FILE = "tests/test_parts.py"
ITEMS = [f"tests/test_{file}.py::test_{name}[{value}]" for file in "abc" for name in range(10) for value in range(20)]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_each_item_is_in_one_part(count: int) -> None:
    dealt = [[item for item in ITEMS if parts.contains((number, count), item)] for number in range(count)]
    assert sorted(itertools.chain(*dealt)) == sorted(ITEMS)
    assert min(map(len, dealt)) > 0.7 * len(ITEMS) / count


def test_parse() -> None:
    assert parts.parse("0/3") == (0, 3)
    assert parts.parse("11/12") == (11, 12)


@pytest.mark.parametrize("text", ["", "3/3", "1", "-1/3", "0/0", "a/b", "1/2/3", "0.5/2"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=r"expected K/N with K from 0 to N - 1: for example --part 0/3"):
        parts.parse(text)


@pytest.mark.slow
def test_option_deals_the_items_of_a_file() -> None:
    """In processes whose hashes of strings differ. Each of them collects the tests, which takes seconds."""

    def collected(number: int) -> list[str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-n0",
            "--all",
            "--part",
            f"{number}/2",
            FILE,
        ]
        environment = {**os.environ, "PYTHONHASHSEED": f"{number + 1}"}
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stdout
        return [line for line in result.stdout.splitlines() if "::" in line]

    first, second = collected(0), collected(1)
    assert first
    assert second
    assert len({*first, *second}) == len(first) + len(second) == 14
    assert all(parts.contains((0, 2), item) for item in first)
