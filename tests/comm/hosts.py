"""Ranks on emulated hosts of their own, which can be unplugged while they run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bagua_kernels.comm.testing import process_command
from bench.netlab import lab as netlab
from tests import limits


class Hosts:
    """Processes of which each has a host."""

    def __init__(self, lab: netlab.Lab, processes: list[Any], paths: list[Path]) -> None:
        self._lab, self._processes, self._paths = lab, processes, paths

    def output(self, rank: int) -> str:
        """What a rank has written so far."""
        return self._paths[rank].read_text()

    def wait_for_output(self, text: str, timeout: float = 60) -> None:
        """Waits until every rank has written a text; the timeout is scaled."""

        def outputs() -> list[str]:
            return [self.output(rank) for rank in range(len(self._paths))]

        limits.until(lambda: all(text in each for each in outputs()), outputs, timeout, pause=0.05)

    def unplug(self, rank: int) -> None:
        """Cuts a host off."""
        self._lab.cut(rank)

    def end(self, rank: int, timeout: float = 60) -> str:
        """Waits for the end of a rank, which must have gone well; returns its output."""
        code = self._processes[rank].wait(limits.seconds(timeout))
        assert code == 0, f"rank {rank}: {code}\n{self.output(rank)}"
        return self.output(rank)


@contextmanager
def on_hosts(
    function: Callable[..., None], args: Sequence[Any], ranks: int, environment: Mapping[str, str] | None = None
) -> Iterator[Hosts]:
    """Starts a function on hosts that links of 1,000 Mbit/s connect; skips the test where none can be emulated."""
    if reason := netlab.available(delay=False):
        pytest.skip(reason)
    with tempfile.TemporaryDirectory() as folder, netlab.Lab(ranks, rate=1000) as lab:
        paths = [Path(folder) / f"rank{rank}" for rank in range(ranks)]
        processes = []
        for rank, path in enumerate(paths):
            variables = {**lab.environment(rank), **(environment or {}), "PYTHONUNBUFFERED": "1"}
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
            with path.open("wb") as file:
                command = process_command(function, args)
                processes.append(lab.start(rank, command, variables, file, subprocess.STDOUT))
        yield Hosts(lab, processes, paths)
