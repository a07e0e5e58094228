"""What docs/communication.md says: its examples run, and its tables are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bagua_kernels import comm, knobs
from bagua_kernels.comm.backends.sockets.tuning import WAYS

PAGE = (Path(__file__).parents[2] / "docs" / "communication.md").read_text()


def test_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    names: dict[str, object] = {}
    examples = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, "communication.md", "exec"), names)
    assert not comm.is_initialized()
    assert names["world"].rank == 0  # type: ignore[attr-defined]


def test_ways_are_those_of_the_code() -> None:
    section = PAGE.split("| operation | way |")[1].split("\n\n")[0]
    told: dict[str, set[str]] = {}
    operation = ""
    for line in section.splitlines()[2:]:
        first, way, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        operation = re.match(r"`(\w+)`", first)[1] if first else operation  # type: ignore[index]
        told.setdefault(operation, set()).add(re.match(r"`(\w+)`", way)[1])  # type: ignore[index]
    known = {name: set(ways) - {"base"} for name, ways in WAYS.items() if name != "all_to_all"}
    assert told == known
    assert WAYS["all_to_all"] == ("direct", "base")


def test_variables_are_the_knobs() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\w.]*) ?\|", PAGE.split("## Environment")[1], re.MULTILINE)
    known = {knob.variable: knob.default for knob in knobs.ALL}
    for variable, default in rows:
        assert str(known[variable]).removesuffix(".0") == default
    own = {name for name in known if name.startswith("BAGUA_KERNELS_")}
    assert {name for name, _ in rows if name.startswith("BAGUA")} == own - {
        "BAGUA_KERNELS_BACKEND",
        "BAGUA_KERNELS_CACHE_MB",
        "BAGUA_KERNELS_WATCH",
    }  # those of one device
