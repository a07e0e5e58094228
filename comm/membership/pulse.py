"""Answers as long as this process lives, so that others know what it means that a connection broke."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref

from bagua_kernels.comm.failures.forked import forget_after_fork
from bagua_kernels.comm.joining.gate import listen

_TOKEN = 16  # bytes
_AT_A_TIME = 64  # calls that wait
_REST = 0.2  # seconds without accepting where the process has no file descriptors left
_SECONDS = 1.0  # for a caller to take the answer

Address = tuple[str, int, str]  # host, port, and what is answered there, in hexadecimal digits


class Pulse:
    """Listens on a thread of its own, and sends each caller a number by which it knows this process.

    A socket alone would not do: forked children have copies, and another process may take the port. Nothing is read from callers.

    Attributes:
        address: where it listens, and what it answers.
    """

    def __init__(self, host: str) -> None:
        """Begins to listen.

        Args:
            host: the address of this host.

        Raises:
            OSError: it cannot.
        """
        token = os.urandom(_TOKEN)
        self._listener = listen(host, _AT_A_TIME)
        self._listener.setblocking(True)
        port = self._listener.getsockname()[1]
        self.address: Address = (host, port, token.hex())
        self._ended = threading.Event()
        forget_after_fork(self)
        self._end = weakref.finalize(self, _close, self._listener, self._ended)
        threading.Thread(
            target=_serve, args=(self._listener, token, self._ended), name="bagua_kernels pulse", daemon=True
        ).start()

    def close(self) -> None:
        """Ends listening; calling it again does nothing."""
        self._end()

    def forget(self) -> None:
        """Closes the copy of a forked child."""
        self._ended.set()
        self._listener.close()


def _close(listener: socket.socket, ended: threading.Event) -> None:
    ended.set()
    # Closing alone would not end a wait for callers.
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _serve(listener: socket.socket, token: bytes, ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            caller, _ = listener.accept()
        except OSError:
            if not ended.is_set():
                time.sleep(_REST)
            continue
        with caller, contextlib.suppress(OSError):  # the caller may have gone
            caller.settimeout(_SECONDS)
            caller.sendall(token)


def has_ended(address: Address, seconds: float) -> tuple[bool, str]:
    """Returns if it is certain that a process has ended, as its host answers in its place; and what was found. Blocks.

    Where nothing comes back in time, or this host could not ask, the process may live: behind a network that is cut, or stopped.

    Args:
        address: of its `Pulse`.
        seconds: for a connection, and for the answer.
    """
    host, port, token = address
    expected, found = bytes.fromhex(token), b""
    try:
        with socket.create_connection((host, port), seconds) as sock:
            while len(found) < len(expected) and (more := sock.recv(len(expected) - len(found))):
                found += more
    except (ConnectionRefusedError, ConnectionResetError) as error:
        return True, f"a new connection failed: {error}"
    except OSError as error:
        return False, f"a new connection failed: {error}"
    if found == expected:
        return False, "its process answers a new connection"
    return True, "another process listens at its port" if found else "a new connection ended without an answer"
