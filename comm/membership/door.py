"""Where processes ask to join a job that runs, and what they are sent."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from bagua_kernels.comm.backends.sockets.mesh import Links, connect_all
from bagua_kernels.comm.failures.forked import forget_after_fork
from bagua_kernels.comm.joining import hello
from bagua_kernels.comm.joining.gate import Gate, listen
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.errors import CommunicationError, MismatchError

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
_MOST = 1 << 20  # bytes of a message
_PORTS = 64  # that are tried, from the given one on
_AT_A_TIME = 64  # processes that wait at a door
_AGAIN = 0.2  # seconds between two rounds of calls
_PATIENCE = 1.0  # seconds for one call: others are asked soon, since a member may be gone
_REFUSALS = 10  # in a row, half a second: members listen before others know their addresses
_SECONDS = 10.0  # for a message to come as a whole, once it has begun


def key_of(secret: Secret) -> Secret:
    """Returns the key of the connections to doors."""
    return secret.derive("door")


class Door:
    """Listens for processes that want to join, on a thread; what is read from them has been signed with the job's secret.

    Attributes:
        address: at which it listens.
    """

    def __init__(self, host: str, port: int, secret: Secret, ask: Callable[[str, Any], None]) -> None:
        """Begins to listen.

        Args:
            host: the address of this host.
            port: the first port to try; others follow where it is in use, as by another rank of this host. 0 for any.
            secret: of the job.
            ask: called with a name for a process and its request, on the thread of the door.

        Raises:
            CommunicationError: no port is free.
        """
        self._listener = _listener(host, port)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._ask, self._lock = ask, threading.Lock()
        self._asked: dict[str, socket.socket] = {}
        self._wake, self._woken = os.pipe()
        self._ended = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, lambda _: None)
        door = weakref.ref(self)
        self._gate = Gate(
            self._selector,
            self._listener,
            key_of(secret),
            0,
            lambda rank, number: True,
            lambda sock, rank, number: _admitted(door, sock),
        )
        forget_after_fork(self)
        self._thread = threading.Thread(target=_serve, args=(door,), name="bagua_kernels door", daemon=True)
        self._thread.start()

    def answer(self, name: str, value: Any) -> None:
        """Sends a process that has asked here what it needs to connect; others are left alone."""
        sock = self.hand_out(name)
        if sock is not None:
            with sock, contextlib.suppress(OSError):  # it may have gone
                sock.settimeout(_SECONDS)
                send(sock, value)

    def hand_out(self, name: str) -> socket.socket | None:
        """Returns the connection of a process that has asked here, which the caller closes; None for others."""
        with self._lock:
            return self._asked.pop(name, None)

    def close(self) -> None:
        """Ends listening; those that wait find their connection closed."""
        if self._ended:
            return
        self._ended = True
        os.write(self._woken, b"x")
        self._thread.join(5.0)
        self._gate.close()
        for sock in (self._listener, *self._asked.values()):
            sock.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self._woken)

    def forget(self) -> None:
        """Closes the copies of a forked child."""
        self._ended = True
        self._listener.close()
        for sock in self._asked.values():
            sock.close()

    def take(self, sock: socket.socket) -> None:
        """Reads the request of a process that is admitted."""
        sock.settimeout(_SECONDS)
        try:
            value = receive(sock)
        except (OSError, ValueError):
            sock.close()
            return
        name = os.urandom(8).hex()
        with self._lock:
            if len(self._asked) >= _AT_A_TIME:
                sock.close()
                return
            self._asked[name] = sock
        self._ask(name, value)


def _serve(door: weakref.ref[Door]) -> None:
    while True:
        found = door()
        if found is None or found._ended:
            return
        selector, gate = found._selector, found._gate
        pause = min(1.0, gate.tick())
        del found
        for ready, _ in selector.select(pause):
            ready.data(ready.fileobj)


def _admitted(door: weakref.ref[Door], sock: socket.socket) -> None:
    found = door()
    if found is None:
        sock.close()
        return
    found.take(sock)


def _listener(host: str, port: int) -> socket.socket:
    if not port:
        return listen(host, _AT_A_TIME)
    for at in range(port, min(port + _PORTS, 1 << 16)):
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, at))
            listener.listen(_AT_A_TIME)
            listener.setblocking(False)
            return listener
        except OSError:
            listener.close()
    raise CommunicationError(f"no port from {port} to {port + _PORTS - 1} is free at {host}: give listen= another one")


def send(sock: socket.socket, value: Any) -> None:
    """Sends a value as JSON; blocks."""
    data = json.dumps(value).encode()
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket) -> Any:
    """Returns a value that `send` has sent; blocks.

    Raises:
        OSError: the connection ended before.
        ValueError: it is no JSON, or too long.
    """
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    if length > _MOST:
        raise ValueError(f"expected a message of at most {_MOST} bytes, got {length}")
    return json.loads(_exactly(sock, length))


def _exactly(sock: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    fill(sock, memoryview(data))
    return bytes(data)


def fill(sock: socket.socket, room: memoryview) -> None:
    """Receives as many bytes as there is room for; blocks.

    Raises:
        OSError: the connection ended before.
    """
    while room:
        got = sock.recv_into(room)
        if not got:
            raise ConnectionResetError("the connection ended")
        room = room[got:]


def knock(address: tuple[str, int], secret: Secret, seconds: float) -> tuple[socket.socket, str]:
    """Returns a connection to a door, and the address of this host from which it was made; blocks for a second at most.

    Raises:
        OSError: if there is none within the time, or the job has another secret.
    """
    sock = hello.call(address, key_of(secret), 0, 0, 0, min(seconds, _PATIENCE), refusals=2)
    return sock, sock.getsockname()[0]


def ask_in_turn(
    doors: Sequence[tuple[str, int]], seconds: float, ask: Callable[[tuple[str, int], float], T], what: str
) -> T:
    """Returns what the first door answers; blocks.

    Args:
        doors: addresses, which are asked in turn, again and again.
        seconds: for all of it.
        ask: asks one of them, within the seconds that are left.
        what: has failed if nobody answers, for the error.

    Raises:
        CommunicationError: nobody answered in time.
        MismatchError: the job has another version of this package, or the like.
    """
    deadline, trouble = time.monotonic() + seconds, list[str]()
    while (left := deadline - time.monotonic()) > 0:
        trouble = []
        for door in doors:
            try:
                return ask(door, left)
            except MismatchError:
                raise
            except (OSError, CommunicationError) as error:
                # Of a member that is gone, or that is lost meanwhile.
                trouble.append(f"{door[0]}:{door[1]}: {error}")
        time.sleep(min(_AGAIN, max(0.0, left)))
    raise CommunicationError(
        f"{what} within {seconds:g} s ({'; '.join(trouble)}): give the addresses of members that run, which they log when they "
        "begin to listen"
    )


def meet(
    rank: int,
    addresses: list[tuple[str, int]],
    listener: socket.socket,
    key: Secret,
    stripes: int,
    seconds: float,
    look: Callable[[], bool] | None = None,
) -> Links:
    """Connects this rank with all others, which call this, too.

    Args:
        rank: this one.
        addresses: of the listeners of all ranks.
        listener: of this rank.
        key: for these connections alone, the same on all ranks.
        stripes: sockets between two ranks.
        seconds: for all of it.
        look: returns True if some of them will not come.

    Raises:
        CommunicationError: some of them did not come.
    """
    found: dict[tuple[int, int], socket.socket] = {}
    size = len(addresses)
    try:
        connect_all(rank, size, stripes, listener, addresses, key, time.monotonic() + seconds, found, look, _REFUSALS)
    except OSError as error:
        for sock in found.values():
            sock.close()
        raise CommunicationError(f"the members of the next epoch did not connect: {error}") from error
    return Links({peer: [found[peer, number] for number in range(stripes)] for peer in range(size) if peer != rank})
