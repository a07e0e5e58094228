"""What gives this process its faults, and notes what happens."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bagua_kernels import knobs
from bagua_kernels.comm.faults.fault import Fault, faults_of
from bagua_kernels.comm.faults.unplugged import unplug

_CONTINUE = "import os, signal, sys, time; time.sleep(float(sys.argv[2])); os.kill(int(sys.argv[1]), signal.SIGCONT)"

_log = logging.getLogger(__name__)


class InjectedError(RuntimeError):
    """The error of a fault "error"."""


def planned() -> list[Fault]:
    """Returns the faults of all ranks that `BAGUA_KERNELS_FAULTS` asks for.

    Raises:
        ValueError: the variable makes no sense.
    """
    faults = faults_of(knobs.FAULTS.get())
    if not knobs.FAULTS_FOLDER.get():
        for each in faults:
            if each.at is not None:
                raise ValueError(
                    f"{each} counts from the job's beginning: set {knobs.FAULTS_FOLDER.variable}, which notes it"
                )
    return faults


def _beginning(folder: Path) -> float:
    """Returns when the job's first process came here, which that process notes by a file."""
    path = folder / "beginning"
    with contextlib.suppress(FileExistsError):
        path.touch(exist_ok=False)
    return path.stat().st_mtime


class Injector:
    """The faults of this process.

    Those at a step happen on the thread that trains, and others on a thread of this object.
    """

    def __init__(self, rank: int, faults: list[Fault], start: int = 0, folder: Path | None = None) -> None:
        """Begins to count the time.

        Args:
            rank: of this process.
            faults: of all ranks.
            start: how often the launcher has started the ranks again.
            folder: for a file about this process, which has its faults and its steps; None for no such file.
        """
        now = time.time()
        began = now if folder is None else _beginning(folder)
        own = [each for each in faults if each.rank == rank]
        self.rank = rank
        self._at_steps = [each for each in own if each.step is not None and each.start == start]
        timed = [(now + each.after, each) for each in own if each.after is not None and each.start == start]
        timed += [(began + each.at, each) for each in own if each.at is not None and began + each.at >= now]
        self._timed = sorted(timed, key=lambda pair: pair[0])
        self._raises: Fault | None = None
        self._file = None if folder is None else (folder / f"{os.getpid()}.jsonl").open("a")
        self._writing = threading.Lock()
        self._note({"rank": rank})
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bagua_kernels faults", daemon=True)
        if self._timed:
            self._thread.start()

    @classmethod
    def of_environment(cls, rank: int) -> Injector | None:
        """Returns that which `BAGUA_KERNELS_FAULTS` asks for; None if it asks for nothing.

        Raises:
            ValueError: the variable makes no sense.
        """
        faults, folder = planned(), knobs.FAULTS_FOLDER.get()
        if not faults and not folder:
            return None
        start = max(knobs.RESTARTS.get(), knobs.SLURM_RESTARTS.get())
        return cls(rank, faults, start, Path(folder) if folder else None)

    def reach(self, step: Callable[[], int]) -> None:
        """Notes that a step is about to begin, and lets faults happen that wait for it.

        Raises:
            InjectedError: that is its fault.
        """
        number = step()
        self._note({"step": number})
        now, self._at_steps = (
            [each for each in self._at_steps if each.step == number],
            [each for each in self._at_steps if each.step != number],
        )
        for each in now:
            self._happen(each)
        if self._raises is not None:
            fault, self._raises = self._raises, None
            raise InjectedError(f"rank {self.rank} was to raise an error: {fault}")

    def close(self) -> None:
        """Lets no other fault happen."""
        self._closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _run(self) -> None:
        for moment, each in self._timed:
            if self._closed.wait(max(0.0, moment - time.time())):
                return
            self._happen(each)

    def _happen(self, fault: Fault) -> None:
        _log.warning("rank %d is given a fault: %s", self.rank, fault)
        self._note({"fault": str(fault)})
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stop":
            words = [sys.executable, "-S", "-E", "-c", _CONTINUE, str(os.getpid()), str(fault.seconds)]
            with subprocess.Popen(words, stdin=subprocess.DEVNULL):
                os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "unplug":
            # Training goes on meanwhile, until it waits for others.
            threading.Thread(target=unplug, args=[fault.seconds], name="bagua_kernels unplug", daemon=True).start()
        elif fault.kind == "notice":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._raises = fault

    def _note(self, what: dict[str, Any]) -> None:
        with self._writing:
            if self._file is not None:
                self._file.write(json.dumps({"time": time.time(), **what}) + "\n")
                self._file.flush()
