"""`bench.against`: both sides take turns, ratios have intervals, and nothing is measured in a tree whose tests fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.against import measure
from bench.against.suites import SUITES, Suite
from bench.ratios import compared, verdict
from tests import reach

OLD = Path("old")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int]]:
    """Which side's jobs have run, and with how many rounds; each job of the working tree takes half as long."""
    found: list[tuple[Path, int]] = []

    def job(root: Path, memory: dict[str, Any]) -> dict[str, float]:
        found.append((root, memory["rounds"]))
        new = {"only here": 1.0} if root == measure.ROOT else {}
        return {"step": 1.0 if root == measure.ROOT else 2.0, "same": 3.0, **new}

    @contextmanager
    def checkout(revision: str) -> Iterator[Path]:
        yield OLD

    monkeypatch.setattr(measure, "SUITES", {"one": Suite("one", "a suite", job)})
    monkeypatch.setattr(measure, "checkout", checkout)
    return found


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["against", "HEAD", "--suites", "one", *words])
    return measure.main()


def test_sides_take_turns_and_the_first_jobs_do_not_count(
    calls: list[tuple[Path, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "found.json"
    assert run(monkeypatch, "--tests", "none", "--pairs", "3", "--rounds", "5", "--output", str(output)) == 0
    sides = [root for root, _ in calls]
    assert sides == [OLD, measure.ROOT, measure.ROOT, OLD, OLD, measure.ROOT, measure.ROOT, OLD]
    assert [rounds for _, rounds in calls] == [1, 1, 5, 5, 5, 5, 5, 5]
    rows = {row["name"]: row for row in json.loads(output.read_text())["suites"]["one"]}
    assert set(rows) == {"step", "same"}
    assert rows["step"]["ratio"] == pytest.approx(0.5)
    assert verdict(rows["step"], 0.03) == "faster"
    assert verdict(rows["same"], 0.03) == ""


def test_nothing_is_measured_if_tests_fail(
    calls: list[tuple[Path, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "tests_of", lambda *_: [sys.executable, "-c", "raise SystemExit(1)"])
    assert run(monkeypatch) == 1
    assert calls == []
    assert "mend them first" in capsys.readouterr().err


def test_an_unknown_revision_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["against", "no-such-commit", "--suites", "imports"])
    with pytest.raises(SystemExit):
        measure.main()
    assert "there is no commit 'no-such-commit'" in capsys.readouterr().err


def test_tests_are_those_that_the_difference_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached_by(change: reach.Change) -> reach.Reached:
        names = change.files or ()
        everything = "it changed" if "pyproject.toml" in names else ""
        return reach.Reached(change, everything, {f"tests/test_{name}": name for name in names})

    given = {"diff": "b.py\na.py\n", "ls-files": "new.py\n", "rev-parse": "0" * 40}
    monkeypatch.setattr(reach, "git", lambda _, name, *rest: given[name])
    monkeypatch.setattr(reach, "reached_by", reached_by)
    assert measure.tests_of("HEAD", "reached")[-3:] == ["tests/test_a.py", "tests/test_b.py", "tests/test_new.py"]
    given["diff"] = "pyproject.toml\n"
    assert measure.tests_of("HEAD", "reached")[-1] == "tests"
    given["diff"] = given["ls-files"] = ""
    assert measure.tests_of("HEAD", "reached") == measure.tests_of("HEAD", "none") == []


def test_an_interval_is_students() -> None:
    logs = [(1.0, 1.1), (1.0, 1.2)]
    (row,) = compared([({"a": old}, {"a": new}) for old, new in logs])
    assert row["ratio"] == pytest.approx((1.1 * 1.2) ** 0.5)
    # Half the range of two logarithms is their standard deviation over the root of 2.
    assert row["interval"][1] / row["ratio"] == pytest.approx((1.2 / 1.1) ** (12.71 / 2))


def test_a_checkout_is_there_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "file").write_text("one")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    (tmp_path / "file").write_text("two")
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    with measure.checkout("HEAD") as folder:
        assert (folder / "file").read_text() == "one"
    assert not folder.exists()


def test_each_suite_has_a_line_about_it() -> None:
    assert {"kernels", "optimizers", "imports", "fc", "tr", "parameters"} == set(SUITES)
    assert all(suite.about for suite in SUITES.values())
