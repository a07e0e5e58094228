"""The entry point: help without PyTorch, errors of one sentence, and programs that get their arguments as they are."""

from __future__ import annotations

import importlib
import importlib.util
import json
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

import bagua_kernels
from bagua_kernels.command.commands import Commands
from bagua_kernels.command.main import commands
from bagua_kernels.command.output import show_rows
from bagua_kernels.command.passing import Passing
from tests import limits
from tests.command.calls import call

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/command.md").read_text()
PROGRAMS = {name: each.module for name, each in commands.commands.items() if isinstance(each, Passing)}
PROGRAM = """
import sys
from bagua_kernels.command.main import commands
commands.main(["--help"], standalone_mode=False)
print(*sorted({"numba", "rich", "torch"} & {*sys.modules}))
"""


def test_entry_point_is_callable() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["bagua-kernels"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_help_imports_nothing_heavy() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limits.seconds(100),
        check=True,
    )
    *lines, loaded = ended.stdout.splitlines()
    assert loaded == ""
    shown = [line.split()[0] for line in lines[lines.index("Commands:") + 1 :]]
    assert shown == sorted(commands.commands)
    assert not any(line.endswith("...") for line in lines[1:]), "a description does not fit into its line"


def test_page_has_all_subcommands() -> None:
    rows = [line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(commands.commands)
    assert all(f"`python -m {module}`" in PAGE for module in PROGRAMS.values())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version") == (0, f"bagua-kernels {bagua_kernels.__version__}\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_names_are_completed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    assert f"_BAGUA_KERNELS_COMPLETE={shell}_source bagua-kernels" in PAGE
    monkeypatch.setenv("_BAGUA_KERNELS_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", "bagua-kernels la")
    monkeypatch.setenv("COMP_CWORD", "la" if shell == "fish" else "1")
    assert "launch-check" in call(capsys).out


@pytest.mark.parametrize("arguments", [["nosuch"], ["codecs", "--nosuch"], ["algorithms", "--ranks", "0"]])
def test_usage_is_status_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("Usage: bagua-kernels")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("expected 1\nmore"), "Error: expected 1\n"),
        (RuntimeError(), "Error: RuntimeError\n"),
        (FileNotFoundError(2, "No such file", "x"), "Error: [Errno 2] No such file: 'x'\n"),
        (ImportError("no torch"), "Error: no torch\n"),
        (click.Abort(), "Aborted!\n"),
    ],
)
def test_errors_are_a_sentence(capsys: pytest.CaptureFixture[str], error: Exception, line: str) -> None:
    def fail() -> None:
        raise error

    group = Commands(commands={"fail": click.Command("fail", callback=fail)})
    with pytest.raises(SystemExit) as ended:
        group.main(["fail"])
    assert ended.value.code == 1
    assert capsys.readouterr().err.strip() == line.strip()


@pytest.mark.parametrize("name", ["doctor", "tune", "advise", "warmup"])
def test_arguments_are_passed_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert importlib.util.find_spec(PROGRAMS[name]) is not None
    got = []

    def run(module: str, *, run_name: str, alter_sys: bool) -> None:
        got.append((module, run_name, sys.argv[1:]))
        sys.exit(7)

    monkeypatch.setattr(runpy, "run_module", run)
    monkeypatch.setattr(sys, "argv", ["bagua-kernels"])
    given = ["--json", "-x", "--", "torchrun", "--help", "--", "a b"]
    assert call(capsys, name, *given).status == 7
    assert got == [(PROGRAMS[name], "__main__", given)]


def test_a_program_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bagua-kernels"])
    # Python warns where a module runs that was imported already.
    monkeypatch.delitem(sys.modules, PROGRAMS["advise"], raising=False)
    ended = call(capsys, "advise", "--model", "resnet50", "--ranks", "4", "--bandwidth", "1Gbps", "--json")
    assert (ended.status, ended.err) == (0, "")
    assert len(json.loads(ended.out)["methods"]) > 20
    assert call(capsys, "advise", "--ranks", "4").status == 2


def test_a_row_is_a_line_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    long = "[bold]word[/bold] " * 30
    show_rows("[red]title", [{"a_b": 1234567, "text": long}, {"a_b": None, "text": True}])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].rstrip() == "[red]title"
    assert [cell.strip() for cell in lines[2].strip("┃").split("┃")] == ["a b", "text"]
    assert [cell.strip() for cell in lines[4].strip("│").split("│")] == ["1,234,567", long.strip()]
    assert [cell.strip() for cell in lines[5].strip("│").split("│")] == ["-", "yes"]
