"""A rank's connection to the store of the heartbeats."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from bagua_kernels.comm.failures.forked import forget_after_fork
from bagua_kernels.comm.failures.liveness_server import LENGTH, LONGEST

_LONGEST_CALL = 30.0  # seconds for an answer


class StoreError(RuntimeError):
    """The store of the heartbeats cannot be reached, or refuses a request."""


class Client:
    """A connection to the store, with the methods of `Records`.

    Any thread may call `close`, which ends a call under way; other calls come from one thread at a time. Every call
    raises `StoreError` where there is no answer within half a minute, or the connection broke; `reconnect` makes another one.

    Args:
        sock: to the server, both sides recognised.
        again: makes another connection like it.
    """

    def __init__(self, sock: socket.socket, again: Callable[[], socket.socket] | None = None) -> None:
        self._sock = sock
        self._again = again
        self._ended = False
        self._lock = threading.Lock()
        self._closed = False
        forget_after_fork(self)

    def beat(
        self, rank: int, changed: dict[str, Any] | None, seen: int, read: int, report: int, depth: int
    ) -> tuple[int, str, dict[str, dict[str, tuple[Any, float]]], list[str]]:
        """See `Records.beat`; the server knows the rank."""
        version, silent, fields, reports = self._ask("beat", changed, seen, read, report, depth)
        return version, silent, fields, reports

    def add(self, key: str, value: int) -> int:
        """Adds to a number, at first 0, and returns the sum."""
        return int(self._ask("add", key, value))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Stores `desired` if the text is `expected` (empty: if there is none); returns the text that is there then."""
        return str(self._ask("compare_set", key, expected, desired))

    def reconnect(self) -> None:
        """Makes a new connection in place of one that broke.

        Raises:
            OSError: if it cannot, or `close` was called.
        """
        if self._again is None:
            raise ConnectionResetError("there is no way to connect again")
        sock = self._again()
        with self._lock:
            if self._ended:
                sock.close()
                raise ConnectionAbortedError("it was closed")
            self._sock, self._closed = sock, False

    def close(self) -> None:
        """Ends the connection for good."""
        self._ended = True
        self._break()

    def _break(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                # Wakes a thread that waits for an answer.
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()

    def forget(self) -> None:
        """Closes a forked child's copy of the connection, so that the server sees the end of the rank."""
        self._closed = self._ended = True
        self._sock.close()

    def _ask(self, *request: Any) -> Any:
        body = json.dumps(request, separators=(",", ":")).encode()
        if len(body) > LONGEST:
            raise StoreError(f"{request[0]} of {len(body)} bytes is too long for the store")
        deadline = time.monotonic() + _LONGEST_CALL
        try:
            with self._lock:
                self._sock.settimeout(_LONGEST_CALL)
                self._sock.sendall(len(body).to_bytes(LENGTH, "little") + body)
                length = int.from_bytes(self._receive(LENGTH, deadline), "little")
                answer = json.loads(self._receive(length, deadline))
        except (OSError, ValueError) as error:
            self._break()
            raise StoreError(f"the heartbeat store: {error}") from error
        if "error" in answer:
            raise StoreError(f"the heartbeat store refused {request[0]}: {answer['error']}")
        return answer["value"]

    def _receive(self, length: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < length:
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            found = self._sock.recv(min(length - len(data), 1 << 18))
            if not found:
                raise ConnectionResetError("its process has ended")
            data += found
        return bytes(data)
