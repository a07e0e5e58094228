"""One child process whose output is read line by line while it runs, and which is killed with everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The variable whose value marks a child and all processes that it starts.
MARK = "BAGUA_KERNELS_GPU_CHILD"
# A line is cut here, so that output without line ends cannot fill the memory.
LONGEST_LINE = 4000
# Seconds after the end of a child in which the rest of its output is read.
PATIENCE = 5.0


class Child:
    """A process under way.

    Attributes:
        seconds: the time from its start to its end, or to now while it runs.
        status: the exit status; the negative number of the signal if one ended it; None while it runs.
        timed_out: True if `kill` ended it because of its limit.
    """

    def __init__(
        self,
        command: Sequence[str],
        on_line: Callable[[str], None],
        limit: float,
        environment: Mapping[str, str] | None = None,
        own_group: bool = True,
    ) -> None:
        """Starts the process.

        Args:
            command: its command line.
            on_line: is called with each line of its output, from another thread.
            limit: seconds after which `poll` kills it.
            environment: variables in addition to those of this process.
            own_group: True for a process group of its own, which is killed as a whole. False leaves the child in the group of
                this process, so that it ends with it. `kill` then ends only the child and its marked descendants.
        """
        self.status: int | None = None
        self.timed_out = False
        self.limit = limit
        self._own_group = own_group
        self._on_line = on_line
        self._started = time.monotonic()
        self._ended: float | None = None
        # Inside of a stage a worker keeps the mark of the stage, too, since both are looked for.
        self._mark = f"{os.environ.get(MARK, '')}/{uuid.uuid4().hex}"
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {}), MARK: self._mark},
            start_new_session=own_group,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def seconds(self) -> float:
        """See the attributes of the class."""
        return (time.monotonic() if self._ended is None else self._ended) - self._started

    def poll(self) -> bool:
        """Returns True if the process has ended; kills it first if it is over its limit."""
        if self.status is not None:
            return True
        # The process stays a zombie here, so that its number still names its group.
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None and self.seconds < self.limit:
            return False
        self.timed_out = ended is None
        self.kill()
        return True

    def wait_a_moment(self) -> None:
        """Waits for a part of a second, for loops around `poll`."""
        time.sleep(0.05)

    def kill(self) -> None:
        """Ends the process and all that it has started, and reads the rest of the output."""
        if self.status is not None:
            return
        if self._own_group:
            os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self.status = self._process.wait()
        self._ended = time.monotonic()
        # Those that have left the group.
        for _ in range(3):
            if not end_marked(self._mark):
                break
        self._reader.join(PATIENCE)
        for pipe in (self._process.stdin, self._process.stdout):
            # A reader that is still at work keeps its end of the pipe.
            if pipe is not None and not (pipe is self._process.stdout and self._reader.is_alive()):
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        with os.fdopen(os.dup(self._process.stdout.fileno()), "rb", buffering=0) as pipe:
            while block := pipe.read(1 << 16):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    self._line(line)
                if len(rest) > LONGEST_LINE:
                    self._line(rest)
                    rest = b""
        if rest:
            self._line(rest)

    def _line(self, line: bytes) -> None:
        # A progress bar writes over its own line.
        text = line[: 4 * LONGEST_LINE].decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]
        self._on_line(text[:LONGEST_LINE])


def end_marked(mark: str) -> list[int]:
    """Kills all processes whose environment has a mark; returns their numbers."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            marked = f"{MARK}={mark}".encode() in entry.read_bytes()
        except OSError:  # ended meanwhile, or of another user
            continue
        if marked and int(entry.parent.name) != os.getpid():
            found.append(int(entry.parent.name))
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return found


def end_with_parent() -> None:
    """Ends this process's group as soon as the process that started it is gone; for the main function of a child."""

    def wait() -> None:
        # The other end of standard input is held by the parent, which writes nothing.
        while os.read(fd, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    fd = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=wait, daemon=True).start()
