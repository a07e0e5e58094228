"""What docs/faults.md names: a test of each fault that is there, in groups that do not change."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/faults.md"
GROUPS = [
    "Optimizers",
    "Codecs",
    "Communication",
    "Failures",
    "Algorithms",
    "Kernels, installation and measurements",
    "Documentation",
]


def functions() -> set[str]:
    """The names of all test functions and helpers of tests."""
    trees = (ast.parse(file.read_text()) for file in (ROOT / "tests").rglob("*.py"))
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def missing(text: str, names: set[str]) -> list[str]:
    """Tests that a text names as `tests/….py`, `test_….py`, `python -m tests.…` or `test_…`, and that are not there."""
    files = {file.name for file in (ROOT / "tests").rglob("*.py")}
    found = []
    for code in re.findall(r"`([^`]+)`", re.sub(r"\s+", " ", text)):
        if path := re.fullmatch(r"(?:python -m )?(tests[./][\w./]+)", code):
            file = path[1] if "/" in path[1] else path[1].replace(".", "/") + ".py"
            there = (ROOT / file).exists() or (ROOT / file).with_suffix("").is_dir()
        elif re.fullmatch(r"test_\w+\.py", code):
            there = code in files
        elif re.fullmatch(r"test_\w+", code):
            there = code in names
        else:
            continue
        if not there:
            found.append(code)
    return found


def test_tests_are_there() -> None:
    assert missing(PAGE.read_text(), functions()) == []


def test_missing_tests_are_found() -> None:
    text = "- A.\n  `tests/no/test_a.py`, `test_nowhere.py`; `python -m\n  tests.nowhere`, `test_no_such`; `p.grad`."
    assert missing(text, {"test_a"}) == [
        "tests/no/test_a.py",
        "test_nowhere.py",
        "python -m tests.nowhere",
        "test_no_such",
    ]


def test_groups() -> None:
    """Each entry is in one of the groups, and once on the page."""
    text = PAGE.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == GROUPS
    assert not re.search(r"^- ", text.partition("\n## ")[0], re.MULTILINE)
    entries = [" ".join(entry.split()) for entry in re.findall(r"^- (?:.+\n)+?(?=- |\n|\Z)", text, re.MULTILINE)]
    assert len(entries) == len(re.findall(r"^- ", text, re.MULTILINE))
    assert len(set(entries)) == len(entries)


def test_changelog_has_no_fault_of_before_the_first_release() -> None:
    """Until a release has had a fault, its repair is no news to anybody who updates."""
    text = (ROOT / "CHANGELOG.md").read_text()
    (first,) = re.findall(r"^## 0\.1\.0\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert "### Fixed" not in first
