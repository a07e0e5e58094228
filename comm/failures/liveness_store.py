"""Opens the store in which the ranks leave their heartbeats."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bagua_kernels import knobs
from bagua_kernels.comm.failures.forked import forget_after_fork
from bagua_kernels.comm.failures.liveness import HOST, Liveness
from bagua_kernels.comm.failures.liveness_client import Client, StoreError
from bagua_kernels.comm.failures.liveness_server import Server
from bagua_kernels.comm.joining import gate, hello
from bagua_kernels.comm.joining.address import own_address
from bagua_kernels.comm.joining.secret import Secret

_FAREWELL = 5.0  # seconds for it to end
_AGAIN = 5.0  # seconds for one try to connect again

# Imports the server, whose modules need nothing but Python's library, without running this package's __init__ files.
_MAIN = """
import sys, types
for name, path in zip(("bagua_kernels", "bagua_kernels.comm"), sys.argv[1:]):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from bagua_kernels.comm.failures.liveness_server import main
main()
"""

_log = logging.getLogger(__name__)


class Host:
    """The server of rank 0: a process, or where none can be started, a thread.

    Args:
        address: the one to listen on.
        key: of its connections.
        size: the number of ranks.

    Attributes:
        address: where it listens, with the port.
    """

    def __init__(self, address: str, key: Secret, size: int) -> None:
        self._listener = gate.listen(address, max(128, size))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._key = key
        self._size = size
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._leash = -1
        try:
            self._process = self._spawn()
        except OSError as error:
            _log.info("the heartbeat store runs on a thread, for no process could be started: %s", error)
        forget_after_fork(self)

    def _spawn(self) -> subprocess.Popen[bytes]:
        if not sys.executable:
            raise OSError("the path of Python's interpreter is not known")
        folder = Path(__file__).parent.parent  # of `comm`
        process = subprocess.Popen(
            # Neither site-packages nor the environment's paths: the server needs Python's own library only.
            [sys.executable, "-I", "-S", "-c", _MAIN, str(folder.parent), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[self._listener.fileno()],
            start_new_session=True,  # Ctrl-C at a terminal is for the ranks
        )
        settings = {
            "listener": self._listener.fileno(),
            "key": self._key.export(),
            "size": self._size,
            "parent": self._owner,
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()
        return process

    def wait_until_ready(self, seconds: float) -> None:
        """Waits until the process serves; if it does not start, a thread takes its place."""
        if self._process is not None and not _is_ready(self._process, seconds):
            _log.info("the heartbeat store runs on a thread, for its process has not started")
            self._end_process()
        if self._process is None:
            read, self._leash = os.pipe()
            server = Server(self._listener, self._key, self._size, read)
            self._thread = threading.Thread(
                target=_serve, args=(server, self._listener, read), name="bagua_kernels heartbeat store", daemon=True
            )
            self._thread.start()
        else:
            self._listener.close()

    def close(self) -> None:
        """Ends the server; in a process that was forked from its owner, closes what that has inherited."""
        self._listener.close()
        if self._leash >= 0:
            os.close(self._leash)
            self._leash = -1
        if self._thread is not None and os.getpid() == self._owner:
            self._thread.join(_FAREWELL)
        self._end_process()

    def forget(self) -> None:
        """Closes what a forked child has inherited, so that the server sees rank 0 come to an end."""
        self.close()

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        if os.getpid() != self._owner:
            process.returncode = 0  # it is the parent's to wait for
            return
        try:
            process.wait(_FAREWELL)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(process: subprocess.Popen[bytes], seconds: float) -> bool:
    assert process.stdout is not None
    # `select` takes no descriptors above 1023.
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    return bool(poll.poll(1000 * seconds)) and os.read(process.stdout.fileno(), 1) == b"+"


def _serve(server: Server, listener: socket.socket, leash: int) -> None:
    try:
        server.run(lambda: True)
    finally:
        listener.close()
        os.close(leash)


def connect(
    rank: int, size: int, exchange: Callable[[Any], list[Any]], secret: Secret, host: str = "", timeout: float = 20.0
) -> Liveness | None:
    """Opens the store on rank 0, connects every rank to it and starts the heartbeats; collective.

    Torch's own store does not work here. It may be in a launcher's process, or busy with a blocking call of another
    thread. Its address is private, and every stranger may write into it.

    Args:
        rank: this rank.
        size: the number of ranks.
        exchange: gathers a value of every rank, in rank order; it may carry them as JSON.
        secret: shared by the ranks.
        host: the address on which rank 0 listens; by default that of the network interface which the ranks use.
        timeout: seconds to connect.

    Returns:
        The running heartbeats, or None, on all ranks, if one of them could not connect: failures are then reported
        without the name of the rank at fault.

    Raises:
        ValueError: if this rank's `BAGUA_KERNELS_HEARTBEAT` cannot be used.
    """
    server: Host | None = None
    offer: dict[str, Any] = {}
    # On all ranks and outside of the block below: a wrong setting is no store that cannot be opened.
    heartbeat = knobs.HEARTBEAT.get()
    if rank == HOST:
        token = os.urandom(16).hex()
        try:
            server = Host(host or own_address(), secret.derive("liveness", token), size)
            # Ranks that beat at different rates would take one another for lost.
            offer = {"address": server.address, "token": token, "heartbeat": heartbeat}
        except (OSError, ValueError) as error:
            offer = {"problem": str(error)}
    liveness, problem = None, ""
    with contextlib.ExitStack() as unfinished:
        if server is not None:
            unfinished.callback(server.close)
        offer = exchange(offer)[HOST]
        if server is not None:
            server.wait_until_ready(timeout)
        try:
            if "problem" in offer:
                raise OSError(offer["problem"])
            address, port = offer["address"]
            key = secret.derive("liveness", offer["token"])
            call = partial(hello.call, (address, port), key, rank, 0, HOST)
            client = Client(call(timeout), lambda: call(_AGAIN))
            unfinished.callback(client.close)
            liveness = Liveness(client, rank, size, heartbeat=offer["heartbeat"], reconnect=client.reconnect)
        except (OSError, StoreError) as error:
            problem = str(error) or type(error).__name__
        problems = {r: text for r, text in enumerate(exchange(problem)) if text}
        if liveness is None or problems:
            if liveness is not None:
                liveness.stop("it runs without heartbeats")
            if rank == HOST:
                _log.warning(
                    "ranks could not connect to rank %d, so errors will not name a lost rank: %s", HOST, problems
                )
            return None
        # Both end with the heartbeats: when those stop, are forgotten, or with the process.
        liveness.release = weakref.finalize(liveness, unfinished.pop_all().close)
    return liveness
