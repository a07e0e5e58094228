"""Limits that only end a hang, in seconds, scaled by how slow this machine is when a run of tests begins.

No test asserts on elapsed time. It waits for an event, and a limit ends it only if the event never comes:

    assert done.wait(limits.seconds(10))
    limits.until(lambda: path.exists(), "the file is written")

A starved process must not be taken for one that hangs, so every limit is multiplied by `factor()`.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
# The factor of this run: processes that tests start inherit it from the first one, and so do the workers of pytest-xdist.
VARIABLE = "BAGUA_KERNELS_TEST_SLOWNESS"
# More would let one test that hangs hold up a run for hours.
MOST = 8.0
# Seconds that `work` takes on a machine of two cores on which every limit has room to spare.
REFERENCE = 0.15
# Seconds of a timeout that must not decide anything: a test whose subject ends without it never waits for so long.
NEVER = 36_000.0
LOOPS, STARTS, ATTEMPTS = 500_000, 3, 3


def seconds(limit: float) -> float:
    """Returns a limit for this machine.

    Args:
        limit: seconds on a machine that is as fast as the reference.
    """
    return limit * factor()


def until(
    condition: Callable[[], object], what: str | Callable[[], object], limit: float = 30.0, pause: float = 0.005
) -> None:
    """Waits until a condition holds.

    Args:
        condition: called again and again.
        what: the event that is waited for, in the words of the error, or a function that returns what is missing.
        limit: seconds on a machine that is as fast as the reference.
        pause: seconds between two calls.

    Raises:
        TimeoutError: if it does not hold within the limit.
    """
    most = seconds(limit)
    deadline = time.monotonic() + most
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {most:g} s: {what() if callable(what) else what}")
        time.sleep(pause)


@functools.cache
def factor() -> float:
    """The factor of this run: measured once, by the first process that asks for it, and inherited by all others.

    Raises:
        ValueError: if the variable holds anything but a number of at least 1.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        measured = [work() for _ in range(ATTEMPTS)]
        wall, processor = (statistics.median(column) for column in zip(*measured, strict=True))
        found = slowness(wall, processor, os.getloadavg()[0], os.cpu_count() or 1)
        os.environ[VARIABLE] = f"{found:g}"
        return found
    try:
        given = float(text)
    except ValueError:
        given = math.nan
    if not 1 <= given < math.inf:
        raise ValueError(f"{VARIABLE}: expected a number of at least 1, got {text!r}")
    return given


def work() -> tuple[float, float]:
    """Runs a fixed amount of Python and starts some interpreters; returns its wall time and its processor time."""
    wall, processor = time.perf_counter(), _processor_time()
    total = 0
    for number in range(LOOPS):
        total += number % 7
    for _ in range(STARTS):
        subprocess.run([sys.executable, "-S", "-c", "import json, threading"], check=True)
    return time.perf_counter() - wall, _processor_time() - processor


def slowness(wall: float, processor: float, load: float, cores: int) -> float:
    """Returns the factor that follows from a measurement, rounded up to a tenth.

    The wall time holds the other work on the machine at that moment. The load average holds that of the last minute, which
    slows down whatever is run by as many processes as there are for each core.

    Args:
        wall: the wall time of `work`.
        processor: its processor time.
        load: the load average of the last minute.
        cores: the number of cores.
    """
    found = max(wall, processor * max(1.0, load / cores)) / REFERENCE
    return min(MOST, max(1.0, math.ceil(10 * found - 1e-9) / 10))


def scale_defaults() -> None:
    """Scales the limits that this package's own tools for tests have where a test names none."""
    # As modules, since packages have functions of the same names; ranks, which import this file too, do without them.
    names = ("backends.local.run", "backends.local.schedule", "testing.processes")
    modules: list[Any] = [importlib.import_module(f"bagua_kernels.comm.{name}") for name in names]
    run, schedule, processes = modules
    run._LONGEST_RUN = schedule._LONGEST = seconds(600)
    schedule.Schedule.__init__.__kwdefaults__["patience"] = seconds(30)
    processes.run_processes.__kwdefaults__["timeout"] = seconds(60)
    processes.Processes.wait.__defaults__ = (seconds(60), None)
    processes.Processes.wait_for_output.__defaults__ = (seconds(30),)


def scale_item(item: Any, slowest: float) -> None:
    """Scales the limit that pytest-timeout puts on an item; one of the command line or the environment stays as it is.

    Args:
        item: the item.
        slowest: seconds for an item that is marked as slow and has no limit of its own.
    """
    import pytest

    # Without pytest-timeout there is no such option. Items of other folders have limits of their own.
    if not hasattr(item.config.option, "timeout") or FOLDER not in item.path.parents:
        return
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        limit = float(marker.args[0])
    elif item.get_closest_marker("slow"):
        limit = slowest
    elif item.config.option.timeout is None and "PYTEST_TIMEOUT" not in os.environ:
        limit = float(item.config.getini("timeout"))
    else:
        return
    item.add_marker(pytest.mark.timeout(seconds(limit)), append=False)


def _processor_time() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
