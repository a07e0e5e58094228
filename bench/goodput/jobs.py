"""Jobs whose ranks are processes that are killed and started again, by the ways that are compared."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bagua_kernels.comm.testing.processes import free_port
from bench.goodput import program
from bench.healing import RANKS, SECRET, doors
from bench.waiting import until

LIMIT = 90.0  # seconds for a rank to come to a step
_WARM = 5.0  # seconds before anything is measured
_FILE = Path(program.__file__)


@dataclass
class Rank:
    """A process, and its output in a file."""

    process: subprocess.Popen[bytes]
    output: Path
    begin: float = field(default_factory=time.time)
    end: float = float("inf")

    def steps(self) -> list[tuple[float, int]]:
        """Returns when it has finished its steps, and their numbers."""
        lines = [
            line.split() for line in self.output.read_text(errors="replace").splitlines() if line.startswith("STEP")
        ]
        return [(float(line[1]), int(line[2])) for line in lines if len(line) == 3]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.end = time.time()


class Job:
    """Four ranks that live singly: ours, or torchft's."""

    def __init__(self, way: str, spec: str, python: str, folder: Path, stack: contextlib.ExitStack) -> None:
        self._way, self._spec, self._python, self._folder, self._stack = way, spec, python, folder, stack
        self._port = free_port()
        self.all: list[Rank] = []
        self.living: list[Rank] = []
        self._address = ""
        if way == "torchft":
            lighthouse = str(Path(python).parent / "torchft_lighthouse")
            words = [lighthouse, "--min_replicas", "1", "--join_timeout_ms", "1000", "--quorum_tick_ms", "100"]
            self._begin([*words, "--bind", f"127.0.0.1:{self._port}"], {}, folder / "lighthouse.txt")
            self._address = f"http://127.0.0.1:{self._port}"
        for rank in range(RANKS):
            self.start(rank)

    def _begin(self, words: list[str], more: dict[str, str], output: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **SECRET, **more}
        with output.open("wb") as file:
            process = subprocess.Popen(words, env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=Path.cwd())
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def start(self, rank: int | None = None) -> None:
        """Starts a rank, or one in the place of another."""
        more, address = dict[str, str](), self._address
        if self._way == "ours" and rank is not None:
            more = {
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(RANKS),
            }
            more |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port)}
        elif self._way == "ours":
            address = doors(self._port + 1)
        more["BAGUA_KERNELS_LISTEN"] = f"127.0.0.1:{self._port + 1}"
        more["PYTHONPATH"] = str(Path.cwd())
        output = self._folder / f"{len(self.all)}.txt"
        process = self._begin([self._python, str(_FILE), self._way, self._spec, address], more, output)
        self.all.append(Rank(process, output))
        self.living.append(self.all[-1])

    def wait(self) -> None:
        """Waits until all living ranks have made a step."""
        for each in self.living:
            until(each.steps, LIMIT, lambda each=each: each.output.read_text(errors="replace")[-2000:])  # type: ignore[misc]

    def kill(self, number: int) -> None:
        """Kills a rank; each in turn."""
        self.living.pop(number % RANKS).kill()

    def useful(self, begin: float, end: float) -> int:
        """Returns the steps of all ranks in a time."""
        return sum(begin <= when < end for each in self.all for when, _ in each.steps())

    def lived(self, begin: float, end: float) -> float:
        """Returns the mean share of ranks that lived in a time."""
        seconds = sum(max(0.0, min(end, each.end) - max(begin, each.begin)) for each in self.all)
        return seconds / (end - begin) / RANKS


class Restarts(Job):
    """Ranks that torchrun starts again, all at once."""

    def start(self, rank: int | None = None) -> None:
        if rank != 0:
            return  # torchrun starts all
        words = [self._python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        words += ["--max-restarts", "1000", "--monitor-interval", "0.1"]
        output = self._folder / "torchrun.txt"
        command = [*words, str(_FILE), "torchrun", "", str(self._folder)]
        self.all = self.living = [Rank(self._begin(command, {}, output), output)]
        self._stack.callback(self._end, self.all[0].process)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        """Lets torchrun end its workers, which have sessions of their own."""
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT)

    def kill(self, number: int) -> None:
        os.kill(int((self._folder / f"{number % RANKS}.pid").read_text()), signal.SIGKILL)

    def useful(self, begin: float, end: float) -> int:
        """See `Job.useful`: of steps that were made again, the first one counts."""
        steps = self.all[0].steps()
        reached = [max((number for when, number in steps if when < moment), default=0) for moment in (begin, end)]
        return RANKS * (reached[1] - reached[0])

    def lived(self, begin: float, end: float) -> float:
        return 1.0


@contextlib.contextmanager
def job_of(way: str, spec: str, python: str) -> Iterator[Job]:
    """Yields a job that has made some steps.

    Args:
        way: "ours", "torchft" or "torchrun".
        spec: of our algorithm.
        python: that has what the way needs.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        made = (Restarts if way == "torchrun" else Job)(way, spec, python, Path(folder), stack)
        made.wait()
        time.sleep(_WARM)
        yield made
