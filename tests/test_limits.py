"""Limits that only end a hang: how the factor of a run is measured, handed on, and put on the limits of items."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bagua_kernels.comm import Schedule, run_ranks
from bagua_kernels.comm.testing import Processes, run_processes
from tests import limits
from tests.clocks import VirtualClock

ROOT = Path(__file__).parents[1]
REFERENCE = limits.REFERENCE


@pytest.mark.parametrize(
    ("wall", "processor", "load", "cores", "expected"),
    [
        (REFERENCE, REFERENCE, 0.0, 2, 1.0),
        (0.5 * REFERENCE, 0.5 * REFERENCE, 0.0, 2, 1.0),  # a faster machine
        (2.5 * REFERENCE, 2.5 * REFERENCE, 0.0, 2, 2.5),  # a slower one
        (3 * REFERENCE, REFERENCE, 0.0, 2, 3.0),  # other work at this moment
        (REFERENCE, REFERENCE, 8.0, 2, 4.0),  # other work in the last minute
        (2 * REFERENCE, 2 * REFERENCE, 6.0, 2, 6.0),  # a slower machine that has other work
        (1.01 * REFERENCE, REFERENCE, 2.0, 2, 1.1),
        (100 * REFERENCE, REFERENCE, 0.0, 2, limits.MOST),
    ],
)
def test_slowness(wall: float, processor: float, load: float, cores: int, expected: float) -> None:
    """At least 1 and at most `MOST`, rounded up to a tenth."""
    assert limits.slowness(wall, processor, load, cores) == expected


@pytest.mark.parametrize("text", ["", "fast", "0.5", "nan", "inf", "-1"])
def test_a_factor_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits.VARIABLE, text)
    with pytest.raises(ValueError, match=f"{limits.VARIABLE}: expected a number of at least 1, got {text!r}"):
        limits.factor.__wrapped__()


def test_processes_inherit_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process measures, the median of all attempts; the others, and the workers of pytest-xdist, take its factor."""
    measured = iter([(9.0, 9.0), (3 * REFERENCE, REFERENCE), (REFERENCE, REFERENCE)])
    monkeypatch.setattr(limits, "work", lambda: next(measured))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.delenv(limits.VARIABLE)
    assert limits.factor.__wrapped__() == 3.0
    assert os.environ[limits.VARIABLE] == "3"
    program = "from tests import limits; print(limits.seconds(7))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=limits.seconds(60))
    assert done.stdout == "21.0\n"


def test_work_is_measured() -> None:
    """It uses the processor, here and in the processes that it starts."""
    before = os.times()
    limits.work()
    after = os.times()
    assert after.children_user + after.children_system > before.children_user + before.children_system
    assert after.user + after.system >= before.user + before.system


def test_until_waits_for_a_condition_and_names_what_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that runs only while it waits."""
    clock, calls = VirtualClock(), []
    monkeypatch.setattr(limits, "time", clock)
    monkeypatch.setattr(limits, "factor", lambda: 2.0)

    def third() -> bool:
        calls.append(clock.now)
        return len(calls) == 3

    limits.until(third, "the third call", pause=0.5)
    assert calls == [0.0, 0.5, 1.0]
    with pytest.raises(TimeoutError, match=r"^not within 20 s: the end of the world$"):
        limits.until(lambda: False, "the end of the world", limit=10, pause=0.5)
    assert 20 < clock.now - 1.0 <= 21
    with pytest.raises(TimeoutError, match=r"^not within 2 s: \['left'\]$"):
        limits.until(lambda: False, lambda: ["left"], limit=1)


def item(path: Path, given: float | None = None, **markers: float) -> tuple[SimpleNamespace, list[pytest.Mark]]:
    """An item with some markers, and those that are added before them."""
    added: list[pytest.Mark] = []

    def get_closest_marker(name: str) -> pytest.Mark | None:
        return getattr(pytest.mark, name)(markers[name]).mark if name in markers else None

    def add_marker(marker: pytest.MarkDecorator, append: bool) -> None:
        assert not append
        added.append(marker.mark)

    config = SimpleNamespace(option=SimpleNamespace(timeout=given), getini=lambda name: "120")
    found = SimpleNamespace(path=path, config=config, get_closest_marker=get_closest_marker, add_marker=add_marker)
    return found, added


def test_limits_of_items_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own one, that of slow items or that of all; but none that the command line gives, and none of other folders."""
    monkeypatch.setattr(limits, "factor", lambda: 2.0)
    monkeypatch.delenv("PYTEST_TIMEOUT", raising=False)
    here = Path(__file__)
    for markers, given, expected in (
        ({}, None, [240.0]),
        ({"slow": 1.0}, None, [1800.0]),
        ({"slow": 1.0, "timeout": 300.0}, None, [600.0]),
        ({"timeout": 0.0}, None, [0.0]),
        ({}, 7.0, []),
        ({"slow": 1.0}, 7.0, [1800.0]),
    ):
        one, added = item(here, given, **markers)
        limits.scale_item(one, 900)
        assert [mark.args[0] for mark in added] == expected
    one, added = item(ROOT / "bench/bench_codecs.py")
    limits.scale_item(one, 900)
    assert added == []
    one, added = item(here)
    one.config.option = SimpleNamespace()  # without pytest-timeout
    limits.scale_item(one, 900)
    assert added == []


def test_this_run_has_its_factor_in_all_limits(request: pytest.FixtureRequest) -> None:
    """What `tests/conftest.py` scales, and this item's own limit unless the command line gives one."""
    factor = float(os.environ[limits.VARIABLE])
    assert limits.seconds(1.0) == factor
    assert run_ranks.__kwdefaults__["timeout"] == 100 * factor
    assert run_processes.__kwdefaults__["timeout"] == 60 * factor
    assert Processes.wait.__defaults__ == (60 * factor, None)
    assert Processes.wait_for_output.__defaults__ == (30 * factor,)
    assert Schedule.__init__.__kwdefaults__["patience"] == 30 * factor
    if getattr(request.config.option, "timeout", 0) is None and "PYTEST_TIMEOUT" not in os.environ:
        marker = request.node.get_closest_marker("timeout")
        assert marker.args[0] == float(request.config.getini("timeout")) * factor
