"""The server of the heartbeats' store, for ranks that know the job's secret.

It runs in a small process of its own beside rank 0, which imports neither torch nor the rest of this package. Heartbeats
therefore arrive while rank 0's interpreter is busy or its process is stopped. They cost its training no time. Strangers
use none of its memory or file descriptors.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
from collections.abc import Callable
from typing import Any

from bagua_kernels.comm.failures.records import Records
from bagua_kernels.comm.joining.gate import Gate
from bagua_kernels.comm.joining.hello import receive
from bagua_kernels.comm.joining.secret import Secret

LENGTH = 4  # bytes of the number before each message, which is JSON
LONGEST = 8 << 20  # bytes of a request: heartbeats take hundreds
_UNREAD = 64 << 20  # bytes of answers that a rank may leave unread
_GLANCE = 0.25  # seconds between two looks at whether rank 0's process lives


class _Client:
    """A rank's connection: what of its requests has arrived, and what of the answers has not left yet."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.arrived = bytearray()
        self.leaving = bytearray()


class Server:
    """Serves a listener until its leash breaks.

    Args:
        listener: not blocking.
        key: of the connections.
        size: the number of ranks.
        leash: a file descriptor that becomes readable, by its end, when the server is to end.
    """

    def __init__(self, listener: socket.socket, key: Secret, size: int, leash: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._clients: dict[socket.socket, _Client] = {}
        self._records = Records(size)
        self._gate = Gate(
            self._selector, listener, key, 0, lambda rank, number: rank < size and number == 0, self._admit
        )
        self._ended = False
        self._selector.register(leash, selectors.EVENT_READ, self._end)

    def run(self, goes_on: Callable[[], bool]) -> None:
        """Serves; returns when the leash breaks, or when `goes_on`, asked some times a second, returns False."""
        try:
            while not self._ended and goes_on():
                for ready, events in self._selector.select(min(_GLANCE, self._gate.tick())):
                    if ready.fileobj in self._clients and events & selectors.EVENT_WRITE:
                        self._write(ready.fileobj)
                    elif events & selectors.EVENT_READ:
                        ready.data(ready.fileobj)
        finally:
            self._gate.close()
            for sock in list(self._clients):
                self._drop(sock)
            self._selector.close()

    def _end(self, leash: Any) -> None:
        self._ended = True

    def _admit(self, sock: socket.socket, rank: int, number: int) -> None:
        # A rank that comes again has lost its connection, though this end may not have heard of it.
        for old in [old for old, client in self._clients.items() if client.rank == rank]:
            self._drop(old)
        self._clients[sock] = _Client(rank)
        self._selector.register(sock, selectors.EVENT_READ, self._read)

    def _drop(self, sock: socket.socket) -> None:
        if self._clients.pop(sock, None) is not None:
            self._selector.unregister(sock)
            sock.close()

    def _read(self, sock: socket.socket) -> None:
        client = self._clients.get(sock)
        if client is None:
            return  # it was dropped after the selector had found it ready
        data = receive(sock, 1 << 18)
        if data is None:
            return
        if not data:
            self._drop(sock)
            return
        client.arrived += data
        while len(client.arrived) >= LENGTH:
            length = int.from_bytes(client.arrived[:LENGTH], "little")
            if length > LONGEST:
                self._drop(sock)
                return
            if len(client.arrived) < LENGTH + length:
                break
            request = bytes(client.arrived[LENGTH : LENGTH + length])
            del client.arrived[: LENGTH + length]
            answer = json.dumps(self._answer(client.rank, request), separators=(",", ":")).encode()
            client.leaving += len(answer).to_bytes(LENGTH, "little") + answer
        if client.leaving:
            self._write(sock)

    def _write(self, sock: socket.socket) -> None:
        client = self._clients[sock]
        try:
            sent = sock.send(client.leaving)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(sock)
            return
        del client.leaving[:sent]
        if len(client.leaving) > _UNREAD:
            self._drop(sock)
            return
        self._selector.modify(sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if client.leaving else 0), self._read)

    def _answer(self, rank: int, request: bytes) -> dict[str, Any]:
        """Returns what a request of a rank yields, or what is wrong with it."""
        try:
            operation, *arguments = json.loads(request)
            if operation == "beat":
                return {"value": self._records.beat(rank, *arguments)}
            return {"value": _OPERATIONS[operation](self._records, *arguments)}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return {"error": f"{type(error).__name__}: {error}"}


_OPERATIONS: dict[str, Callable[..., Any]] = {"add": Records.add, "compare_set": Records.compare_set}


def main() -> None:
    """Runs a server whose settings arrive, as one line of JSON, at the standard input, which is its leash from then on."""
    line = bytearray()
    while not line.endswith(b"\n"):
        # Nothing beyond the line may be read, or the leash would be deaf.
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    settings = json.loads(line)
    listener = socket.socket(fileno=settings["listener"])
    listener.setblocking(False)
    server = Server(listener, Secret(bytes.fromhex(settings["key"])), settings["size"], 0)
    os.write(1, b"+")
    os.close(1)
    # Forked children of rank 0 may hold copies of the leash; then only the new parent shows that rank 0 has gone.
    server.run(lambda: os.getppid() == settings["parent"])
    sys.exit(0)
