"""Starts processes as copies of one that has imported PyTorch already: milliseconds instead of seconds for each."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

# Variables that libraries read when they are imported, which is before the copy is made.
READ_AT_IMPORT = ("CUDA", "KMP_", "LD_", "MKL_", "NUMBA_", "OMP_", "PYTHON", "TORCH_", "TRITON_")
# Copies of one server share the order of its sets. Ranks of two servers do not, as processes of their own would not.
SERVERS = 2
_SLOW = ("torch._dynamo",)  # imported by the first optimizer of a process
_ROOM = 1 << 20  # bytes of a request
_COMMAND = (
    f"import sys; from {__name__} import serve; from {__package__}.processes import run_file; "
    "run_file(*serve(sys.argv[1:]))"
)


class ForkedProcess:
    """One process that a server has started, with the methods of `subprocess.Popen` that `Processes` uses.

    Attributes:
        pid: its number.
        returncode: its exit status once it has ended, or the negative number of the signal that ended it; else None.
    """

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Returns the exit status, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.status(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it has ended, and returns its exit status.

        Raises:
            subprocess.TimeoutExpired: if it has not in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
            self.returncode = self._server.status(self.pid, max(0.0, left))
            if self.returncode is None and deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A process that has imported PyTorch and what this process uses of this package, and starts copies of itself.

    It ends with this process, or when `close` is called.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.RLock()
        self._ended: dict[int, int] = {}
        self._environment = read_at_import(os.environ)
        with theirs:
            fd = theirs.fileno()
            # One thread, or a copy would have only one of several.
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            command = [sys.executable, "-c", _COMMAND, str(fd), *_parts()]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[fd], env=environment)
        atexit.register(self.close)

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Returns True if a copy in this environment is like a new process."""
        own = {**self._environment, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        wanted = read_at_import(environment)
        # The path of modules is applied to the copy, too.
        return {**wanted, "PYTHONPATH": ""} == {**own, "PYTHONPATH": ""} and self._process.poll() is None

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int
    ) -> ForkedProcess:
        """Starts a copy that calls `run_file`.

        Args:
            arguments: of `run_file`.
            environment: all of its variables.
            stdout: a file descriptor.
            stderr: a file descriptor.

        Raises:
            RuntimeError: if the server has ended.
        """
        request = json.dumps([list(arguments), dict(environment), os.getcwd()]).encode()
        with self._lock:
            try:
                socket.send_fds(self._socket, [request], [stdout, stderr])
                while (pid := self._read(None)) is None:
                    pass
            except OSError as error:
                raise RuntimeError(f"the server that starts processes has ended: {error}") from error
        return ForkedProcess(self, pid)

    def status(self, pid: int, limit: float) -> int | None:
        """Returns the exit status of a copy; None if it has not ended within `limit` seconds."""
        with self._lock:
            if pid not in self._ended:
                self._read(limit)
            return self._ended.pop(pid, None)

    def close(self) -> None:
        """Ends the server; copies that run go on. Calling it again does nothing."""
        atexit.unregister(self.close)
        self._socket.close()
        self._process.wait()

    def _read(self, limit: float | None) -> int | None:
        """Takes one message; returns the process number if a copy was started."""
        ready, _, _ = select.select([self._socket], [], [], limit)
        if not ready:
            return None
        message = self._socket.recv(_ROOM)
        if not message:
            raise ConnectionResetError("its connection was closed")
        kind, pid, status = json.loads(message)
        if kind == "started":
            return int(pid)
        self._ended[pid] = status
        return None


@functools.cache
def servers() -> list[ForkServer]:
    """The servers of this process, started at the first call."""
    return [ForkServer() for _ in range(SERVERS)]


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that count when libraries are imported."""
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}


def _parts() -> list[str]:
    """Returns what has been imported: parts of this package, doors into other libraries, and what takes PyTorch seconds."""
    package = __name__.partition(".")[0]
    parts = [name for name in list(sys.modules) if name.startswith(f"{package}.")]
    found = [name for name in parts if name.count(".") == 1 or name.startswith(f"{package}.integrations.")]
    return found + [name for name in _SLOW if name in sys.modules]


def serve(arguments: Sequence[str]) -> list[str]:
    """Starts copies until the connection ends; returns in each copy, with the arguments of `run_file`.

    Args:
        arguments: the file descriptor of the connection, and the modules to import.
    """
    for name in arguments[1:]:
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with socket.socket(fileno=int(arguments[0])) as connection:
        fd = connection.fileno()
        while True:
            ready, _, _ = select.select([fd, wake], [], [])
            if wake in ready:
                os.read(wake, 4096)
            _report(connection)
            if fd not in ready:
                continue
            request, fds, _, _ = socket.recv_fds(connection, _ROOM, 2)
            if not request:
                sys.exit()
            call, environment, folder = json.loads(request)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _settle(fds, [wake, woken], environment, folder)
                return list(call)
            for each in fds:
                os.close(each)
            connection.send(json.dumps(["started", pid, 0]).encode())


def _report(connection: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        connection.send(json.dumps(["ended", pid, os.waitstatus_to_exitcode(status)]).encode())


def _settle(fds: Sequence[int], unused: Sequence[int], environment: dict[str, Any], folder: str) -> None:
    """Makes this copy what a new process would be."""
    for source, target in zip(fds, (1, 2), strict=True):
        os.dup2(source, target)
    for each in (*fds, *unused):
        os.close(each)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [
        path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path
    ]
