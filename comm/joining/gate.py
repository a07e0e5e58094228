"""The listener's side of the hello: it admits processes of the job, and bounds what strangers can cost.

A listener reads 80 bytes of a stranger at most, answers nothing, and keeps few strangers for a short time.
"""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import time
from collections.abc import Callable

from bagua_kernels.comm.joining.hello import CLAIM, MAGIC, OPENING, REFUSAL, receive, split_opening, try_to_send
from bagua_kernels.comm.joining.secret import Secret

_STRANGERS = 64  # connections that have not opened rightly yet; the oldest go first
_PATIENCE = 10.0  # seconds for an opening
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REST = 0.2  # seconds without accepting where the process has no file descriptors left


def listen(address: str, backlog: int) -> socket.socket:
    """Returns a socket that listens on one address of this host, at a free port.

    Raises:
        OSError: if it cannot.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {address}: {error}") from error
    return listener


class _Caller:
    """A connection that is not recognised yet.

    Attributes:
        data: what of the awaited message has arrived.
        transcript: what both sides sign; empty until the opening has proved right.
        claim: the caller's rank and the number of the connection.
        until: when its time is up.
    """

    def __init__(self, until: float) -> None:
        self.data = b""
        self.transcript: tuple[bytes, ...] = ()
        self.claim = (-1, -1)
        self.until = until


class Gate:
    """Takes the calls that reach a listener, and hands on those of the job's own processes.

    It never blocks: it registers its sockets with a selector whose keys' `data` are functions of the socket, which the
    owner's loop calls.

    Args:
        selector: of the owner's loop.
        listener: not blocking.
        key: derived from the job's secret for these connections alone.
        rank: this rank.
        wanted: returns whether a connection, by the caller's rank and its number, is expected.
        admit: takes a connection that was recognised (not blocking, no longer registered), the caller's rank and number.
        patience: seconds from a right opening to the proof.

    Attributes:
        shortage: why no connection can be accepted, where the process lacks file descriptors; else empty.
        refused: the ranks that callers gave who did not know the secret.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        key: Secret,
        rank: int,
        wanted: Callable[[int, int], bool],
        admit: Callable[[socket.socket, int, int], None],
        patience: float = 30.0,
    ) -> None:
        self.shortage = ""
        self.refused: set[int] = set()
        self._selector = selector
        self._listener = listener
        self._key = key
        self._rank = rank
        self._wanted = wanted
        self._admit = admit
        self._patience = patience
        self._callers: dict[socket.socket, _Caller] = {}
        self._strangers: dict[socket.socket, None] = {}  # those of `_callers` without a right opening, oldest first
        self._nonces: set[bytes] = set()
        self._rests_until = 0.0
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def tick(self) -> float:
        """Drops callers whose time is up; returns the seconds after which it wants to be called again."""
        now = time.monotonic()
        if self._rests_until and now >= self._rests_until:
            self._rests_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for sock in [sock for sock, caller in self._callers.items() if now >= caller.until]:
            self._drop(sock)
        ends = [caller.until for caller in self._callers.values()]
        return max(0.0, min([now + 60.0, *ends, *([self._rests_until] if self._rests_until else [])]) - now)

    def close(self) -> None:
        """Closes the connections of those who were not recognised; the listener is the owner's."""
        for sock in list(self._callers):
            self._drop(sock)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_STRANGERS):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    continue  # the caller has hung up already
                if self._strangers:
                    self._drop(next(iter(self._strangers)))
                    continue
                # The listener stays ready, so it is left alone for a moment: to ask at once again would spin.
                self.shortage = str(error)
                self._rests_until = time.monotonic() + _REST
                self._selector.unregister(listener)
                return
            self.shortage = ""
            sock.setblocking(False)
            self._callers[sock] = _Caller(time.monotonic() + _PATIENCE)
            self._strangers[sock] = None
            self._selector.register(sock, selectors.EVENT_READ, self._read)
            self._read(sock)  # most bring their opening along
            while len(self._strangers) > _STRANGERS:
                self._drop(next(iter(self._strangers)))

    def _read(self, sock: socket.socket) -> None:
        caller = self._callers.get(sock)
        if caller is None:
            return  # it was dropped after the selector had found it ready
        wanted = Secret.NBYTES if caller.transcript else OPENING
        data = receive(sock, wanted - len(caller.data))
        if data is None:
            return
        caller.data += data
        if not data or not (MAGIC.startswith(caller.data[: len(MAGIC)]) or caller.transcript):
            self._drop(sock)
        elif len(caller.data) == wanted:
            message, caller.data = caller.data, b""
            (self._prove if caller.transcript else self._open)(sock, caller, message)

    def _open(self, sock: socket.socket, caller: _Caller, message: bytes) -> None:
        claim, nonce, signature = split_opening(message)
        caller.claim = CLAIM.unpack(claim)
        us = self._rank.to_bytes(4, "little")
        if not self._key.verify(signature, b"opening", us, claim, nonce):
            if self._wanted(*caller.claim):  # else a stranger could name ranks without end
                self.refused.add(caller.claim[0])
            try_to_send(sock, REFUSAL)
            self._drop(sock)
        elif nonce in self._nonces or not self._wanted(*caller.claim):
            self._drop(sock)
        else:
            self._nonces.add(nonce)
            self._strangers.pop(sock, None)
            own = secrets.token_bytes(Secret.NBYTES)
            caller.transcript = (us, claim, nonce, own)
            caller.until = time.monotonic() + self._patience
            if not try_to_send(sock, own + self._key.sign(b"answer", *caller.transcript)):
                self._drop(sock)

    def _prove(self, sock: socket.socket, caller: _Caller, signature: bytes) -> None:
        if not self._key.verify(signature, b"proof", *caller.transcript) or not self._wanted(*caller.claim):
            self._drop(sock)
            return
        del self._callers[sock]
        self._selector.unregister(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._admit(sock, *caller.claim)

    def _drop(self, sock: socket.socket) -> None:
        self._callers.pop(sock, None)
        self._strangers.pop(sock, None)
        self._selector.unregister(sock)
        sock.close()
