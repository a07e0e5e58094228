"""The list of faults fits the project, and its runner notices what a run of tests shows; `make mutations` tries the faults."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests import mutations
from tests.doors.faults import FAULTS as OF_DOORS
from tests.grids import folded
from tests.mutations import FAULTS, ROOT, Copy, Fault, judged

EXAMPLE = Fault("a room", "file.py", "x + 1", "x - 1", "Everything.", ("tests",))


def test_each_room_has_two_faults() -> None:
    assert set(Counter(fault.room for fault in FAULTS).values()) == {2}
    assert len(FAULTS) == 40


def test_most_faults_are_for_the_default_tier() -> None:
    assert sum(fault.tier == "all" for fault in FAULTS) <= 4


every_fault = folded(fault=[pytest.param(fault, id=f"{fault.room}: {fault.new}") for fault in (*FAULTS, *OF_DOORS)])


@every_fault
def test_a_fault_changes_one_line_into_another_program(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    changed = fault.applied(text)
    compile(changed, fault.file, "exec")
    assert "\n" not in fault.old + fault.new
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


@every_fault
def test_the_tests_of_a_fault_exist(fault: Fault) -> None:
    assert fault.tests
    for test in fault.tests:
        file, *names = test.split("::")
        assert (ROOT / file).exists()
        # A run of named functions takes all of their parameters.
        assert not names or fault.tier == "all"
        code = (ROOT / file).read_text() if names else ""
        assert all(f"def {name}(" in code or f"class {name}" in code for name in names)


def test_a_text_that_is_not_there_once_is_refused() -> None:
    assert EXAMPLE.applied("y = x + 1\n") == "y = x - 1\n"
    for text in ("y = x\n", "y = x + 1, x + 1\n"):
        with pytest.raises(ValueError, match=r"file\.py has 'x \+ 1' [02] times, expected once"):
            EXAMPLE.applied(text)


@pytest.mark.parametrize(
    ("status", "output", "noticed", "text"),
    [
        (
            1,
            "..F\nFAILED tests/test_a.py::test_b[a, 1-2] - AssertionError: no\n",
            True,
            "tests/test_a.py::test_b[a, 1-2]",
        ),
        (1, "..E\nERROR tests/test_a.py::test_b - OSError\n", True, "tests/test_a.py::test_b"),
        (1, "+++++++++++ Timeout +++++++++++\n", True, "a test's limit of time"),
        (1, "Traceback\n", False, "exit status 1: Traceback\n"),
        (0, "3 passed\n", False, "all tests passed"),
        (2, "ERROR tests/test_a.py\n", False, "exit status 2: ERROR tests/test_a.py\n"),
        (5, "no tests ran\n", False, "exit status 5: no tests ran\n"),
        (None, "..", False, "nothing failed within"),
    ],
)
def test_only_a_failed_test_notices_a_fault(status: int | None, output: str, noticed: bool, text: str) -> None:
    found = judged(status, output)
    assert found[0] is noticed
    assert found[1] == text or not noticed
    assert found[1].startswith(text)


def small_project(folder: Path) -> Path:
    """Makes a project whose packages are empty but for one function with a test."""
    for name in mutations.FOLDERS:
        (folder / name).mkdir(parents=True)
    (folder / "bagua_kernels" / "__init__.py").touch()
    for name in ("comm", "algorithms"):
        (folder / name / "__init__.py").touch()
        (folder / "bagua_kernels" / name).symlink_to(f"../{name}")
    (folder / "pyproject.toml").touch()
    (folder / "comm" / "sums.py").write_text("def successor(x):\n    return x + 1\n")
    (folder / "tests" / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--all', action='store_true')\n"
    )
    (folder / "tests" / "test_sums.py").write_text(
        "from bagua_kernels.comm.sums import successor\n\n\ndef test_successor():\n    assert successor(2) == 3\n"
    )
    return folder


def test_a_fault_is_noticed_in_a_copy_which_alone_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Starts pytest four times, which takes seconds.
    project = small_project(tmp_path / "project")
    monkeypatch.setattr(mutations, "ROOT", project)
    fault = Fault("comm", "comm/sums.py", "x + 1", "x - 1", "The successor.", ("tests/test_sums.py",))
    harmless = Fault("comm", "comm/sums.py", "x + 1", "1 + x", "Nothing.", ("tests/test_sums.py",), "all")
    copy = Copy(tmp_path / "copy", tmp_path)
    copy.check()
    assert not mutations.failing([fault], [copy])
    result = mutations.tried(fault, copy)
    assert (result.noticed, result.text) == (True, "tests/test_sums.py::test_successor")
    assert not mutations.tried(harmless, copy).noticed
    # Both are as before.
    for folder in (project, copy.root):
        assert (folder / "comm" / "sums.py").read_text() == "def successor(x):\n    return x + 1\n"
    with copy.changed(fault):
        assert "assert 1 == 3" in mutations.failing([fault], [copy])
    copy.root = tmp_path / "empty"
    copy.root.mkdir()
    copy.environment["PYTHONPATH"] = str(project)
    with pytest.raises(RuntimeError, match="expected imports from"):
        copy.check()


def test_a_run_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutations, "ROOT", small_project(tmp_path / "project"))
    copy = Copy(tmp_path / "copy", tmp_path)
    status, _ = copy.run(["-c", "import threading; threading.Event().wait()"], 0.0)
    assert status is None


def test_faults_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutations.main(["--list", "--only", "0", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all(FAULTS[number].why in lines[3 * number] for number in (0, 1))
