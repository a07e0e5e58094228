"""Ranks as processes of this machine, for tests: started with torchrun's environment, watched, and always ended."""

from __future__ import annotations

import errno
import importlib.util
import inspect
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

import bagua_kernels
from bagua_kernels.comm.testing.fork_server import servers

Target = Callable[..., object] | str | Path
_ROOT = Path(bagua_kernels.__path__[0]).parent
# Below those that systems give to outgoing connections: such a one could take the port before rank 0 listens.
_PORTS = (16_384, 32_768)
_MAIN = f"import sys; from {__name__} import run_file; run_file(*sys.argv[1:])"


class Process(Protocol):
    """What `subprocess.Popen` and `ForkedProcess` have in common."""

    returncode: Any

    def poll(self) -> int | None: ...  # noqa: D102
    def wait(self, timeout: float | None = None) -> int: ...  # noqa: D102
    def send_signal(self, number: signal.Signals, /) -> None: ...  # noqa: D102
    def kill(self) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class ProcessResult:
    """How a rank's process ended.

    Attributes:
        returncode: its exit status; the negative number of the signal that ended it, if one did.
        stdout: what it printed.
        stderr: what it printed there.
    """

    returncode: int
    stdout: str
    stderr: str


def run_processes(
    target: Target,
    size: int,
    *,
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    fresh: bool = False,
) -> list[ProcessResult]:
    """Runs `target` in `size` processes that find one another on 127.0.0.1, and waits for them.

    A function runs in copies of a process that has imported this package. If `env` has a variable that libraries read when
    they are imported (`READ_AT_IMPORT`), it runs in new processes, as a script does.

    Args:
        target: a function at the top level of a file, or the path of a script.
        size: the number of ranks.
        args: JSON values for the function, or the script's command line.
        env: variables on top of the environment and of torchrun's.
        timeout: seconds after which all that still run are killed.
        fresh: True for new processes in any case, as a function needs them that forks.

    Returns:
        The results in rank order.

    Raises:
        TimeoutError: if a process did not end in time; the message holds the end of every rank's output.
    """
    with Processes(target, size, args=args, env=env, fresh=fresh) as processes:
        return processes.wait(timeout)


class Processes:
    """Ranks under way; a context manager that kills on exit what still runs.

    The arguments are those of `run_processes`.
    """

    def __init__(
        self,
        target: Target,
        size: int,
        *,
        args: Sequence[Any] = (),
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
    ) -> None:
        self._files: list[tuple[IO[bytes], IO[bytes]]] = []
        self._processes: list[Process] = []
        command = process_command(target, args)
        port = str(free_port())
        try:
            for rank in range(size):
                files = (tempfile.TemporaryFile(), tempfile.TemporaryFile())  # noqa: SIM115
                self._files.append(files)
                environment = {**_environment(rank, size, port), **(env or {})}
                self._processes.append(_start(command, None if fresh else rank, environment, files))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Processes:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kills what still runs."""
        self.close()

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to the process of a rank."""
        self._processes[rank].send_signal(number)

    def poll(self, rank: int) -> int | None:
        """Returns the exit status of a rank, or None while it runs."""
        return self._processes[rank].poll()

    def output(self, rank: int) -> str:
        """Returns what a rank has printed so far."""
        return self._read(rank, 0)

    def wait_for_output(self, rank: int, text: str, timeout: float = 30.0) -> None:
        """Waits until a rank has printed a text.

        Raises:
            TimeoutError: if it has not in time, or ended before.
        """
        deadline = time.monotonic() + timeout
        while text not in self.output(rank):
            if time.monotonic() > deadline or (self.poll(rank) is not None and text not in self.output(rank)):
                raise TimeoutError(f"rank {rank} did not print {text!r} within {timeout:g} s:\n{self._tails()}")
            time.sleep(0.02)

    def wait(self, timeout: float = 60.0, ranks: Sequence[int] | None = None) -> list[ProcessResult]:
        """Waits until the processes have ended, by default all of them.

        Raises:
            TimeoutError: if one has not in time; the message holds the end of every rank's output.
        """
        ranks = range(len(self._processes)) if ranks is None else ranks
        deadline = time.monotonic() + timeout
        for rank in ranks:
            try:
                self._processes[rank].wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                running = [r for r in ranks if self.poll(r) is None]
                raise TimeoutError(f"ranks {running} still run after {timeout:g} s:\n{self._tails()}") from None
        return [ProcessResult(self._processes[r].returncode, self._read(r, 0), self._read(r, 1)) for r in ranks]

    def close(self) -> None:
        """Kills what still runs, and frees everything."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
        for files in self._files:
            for file in files:
                file.close()

    def _read(self, rank: int, which: int) -> str:
        # A read at a position of its own: the processes share the position of the file handle.
        file = self._files[rank][which]
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")

    def _tails(self) -> str:
        ranks = range(len(self._processes))
        return "\n".join(
            f"rank {r} ({self.poll(r)=}):\n{self._read(r, 0)[-1500:]}{self._read(r, 1)[-3000:]}" for r in ranks
        )


def free_port() -> int:
    """Returns a port of 127.0.0.1 that nobody listened on a moment ago, and that no outgoing connection is given."""
    for _ in range(100):
        with socket.socket() as probe:
            port = random.SystemRandom().randrange(*_PORTS)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return port
    raise RuntimeError(f"got 100 ports of {_PORTS[0]} to {_PORTS[1] - 1} that are in use, expected a free one")


def process_command(target: Target, args: Sequence[Any]) -> list[str]:
    """Returns the command that runs a function at the top level of a file, or a script, in a process of its own."""
    if isinstance(target, (str, Path)):
        return [sys.executable, str(target), *map(str, args)]
    if "." in target.__qualname__:
        raise ValueError(f"expected a function at the top level of its file, got {target.__qualname__}")
    source = inspect.getsourcefile(target)
    if source is None:
        raise ValueError(f"expected a function whose file is known, got {target!r}")
    return [sys.executable, "-c", _MAIN, str(Path(source).resolve()), target.__qualname__, json.dumps(list(args))]


def _start(
    command: list[str], rank: int | None, environment: dict[str, str], files: tuple[IO[bytes], IO[bytes]]
) -> Process:
    if rank is not None and command[1:3] == ["-c", _MAIN]:
        server = servers()[rank % len(servers())]
        if server.serves(environment):
            return server.start(command[3:], environment, files[0].fileno(), files[1].fileno())
    out, errors = files
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=environment)


def run_file(path: str, name: str, args: str) -> None:
    """Calls the function `name` of a file with arguments that are a list in JSON."""
    sys.argv[1:] = [path, name, args]
    # Loaded from its file, for a test module has no name under which it could be imported.
    spec = importlib.util.spec_from_file_location("rank_main", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules["rank_main"] = module
    spec.loader.exec_module(module)
    getattr(module, name)(*json.loads(args))


def _environment(rank: int, size: int, port: str) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {
        **inherited,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
    }
