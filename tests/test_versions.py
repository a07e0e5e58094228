"""The versions that pyproject.toml promises are those that `make test-oldest` and `make test-newest` test with."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import bagua_kernels
from tests import limits, reach, versions

PROJECT = tomllib.loads((versions.ROOT / "pyproject.toml").read_text())["project"]


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text.partition("+")[0])))


def test_floors_are_what_is_tested() -> None:
    """Each dependency is tested in the first release that is allowed."""
    floors = dict(requirement.split(">=") for requirement in PROJECT["dependencies"])
    oldest = versions.pins("constraints-oldest.txt")
    assert set(floors) <= set(oldest)
    for name, floor in floors.items():
        tested = numbers(oldest[name].partition("==")[2])
        assert tested[: len(numbers(floor))] == numbers(floor)
        assert not any(tested[len(numbers(floor)) :]), f"{name}: the floor is {floor}, tested is {oldest[name]}"
    assert numbers(floors["torch"]) == bagua_kernels._LEAST_TORCH
    pythons = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert (pythons[0], pythons[-1]) == (versions.PYTHONS["oldest"], versions.PYTHONS["newest"])
    assert PROJECT["requires-python"] == f">={versions.PYTHONS['oldest']}"


@pytest.mark.parametrize("which", versions.PYTHONS)
def test_torch_is_a_cpu_build(which: str) -> None:
    """By its local version: pip would take a build for CUDA, which has gigabytes, for any other."""
    assert [each for each in versions.constraints(which) if each.startswith("torch==")] == [
        versions.pins(f"constraints-{which}.txt")["torch"]
    ]
    assert versions.pins(f"constraints-{which}.txt")["torch"].endswith("+cpu")


def test_one_commit_in_ten_is_due() -> None:
    due = [versions.is_due(reach.Change(head=f"{number:x}", files=("comm/work.py",))) for number in range(100)]
    assert sum(due) == 10
    for name in versions.INSTALLED:
        assert versions.is_due(reach.Change(head="1", files=(name,)))
    assert versions.is_due(reach.Change(reason="no git"))


def test_what_cannot_be_had_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "python_of", lambda _: None)
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    for file in versions.INSTALLED:
        (tmp_path / file).write_text((Path(__file__).parents[1] / file).read_text())
    assert versions.main(["newest"]) == 0
    told = json.loads((tmp_path / "results" / "versions-newest.json").read_text())
    assert (told["ran"], told["reason"]) == (False, "there is no Python 3.13")
    assert versions.main(["oldest", "--end", "1"]) == 0
    assert json.loads((tmp_path / "results" / "versions-oldest.json").read_text())["reason"] == "no time is left"


@pytest.mark.parametrize(
    ("version", "accepted"),
    sorted({"2.6.0+cu124": False, "2.8.1": False, "2.9.0a0+git": True, "2.10.0": True, "3.0": True}.items()),
)
def test_a_torch_below_the_floor_is_refused_at_import(version: str, accepted: bool) -> None:
    program = (
        "import sys, types\n"
        "sys.modules['torch'] = types.ModuleType('torch')\n"
        f"sys.modules['torch'].__version__ = {version!r}\n"
        "import bagua_kernels\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=versions.ROOT,
        capture_output=True,
        text=True,
        timeout=limits.seconds(60),
        check=False,
    )
    assert (result.returncode == 0) == accepted
    if not accepted:
        last = result.stderr.splitlines()[-1]
        assert last.startswith(f"ImportError: bagua_kernels needs PyTorch 2.9 or newer, got {version}: run pip install")
