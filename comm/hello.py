"""How two processes of a job recognise each other on a connection before anything else is read from it.

The caller opens with a nonce, its rank and the number of the connection, signed; the listener answers with a nonce of
its own and a signature of both; the caller signs both in its turn. Each signature covers the role, both ranks and the
number, so that none can be reflected or used elsewhere, and both nonces, so that none can be replayed.

A listener reads 80 bytes of a stranger at most, answers nothing, and keeps few strangers for a short time.
"""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable

from bagua_kernels.comm.secret import Secret

_MAGIC = b"bagua\x00\x01\n"
_CLAIM = struct.Struct("<II")  # rank of the caller, number of the connection
_N = Secret.NBYTES
_OPENING = len(_MAGIC) + _CLAIM.size + 2 * _N  # magic, claim, nonce, signature
_ANSWER = 2 * _N  # nonce, signature
_REFUSAL = b"bagua_kernels: this job has another secret".ljust(_ANSWER)
_STRANGERS = 64  # connections that have not opened rightly yet; the oldest go first
_PATIENCE = 10.0  # seconds for an opening
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REST = 0.2  # seconds without accepting where the process has no file descriptors left
_AGAIN = 0.05  # seconds before a call is repeated


class HelloError(OSError):
    """The other side of a connection does not know the job's secret."""


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
        wanted = _N if caller.transcript else _OPENING
        try:
            data = sock.recv(wanted - len(caller.data))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        caller.data += data
        if not data or not (_MAGIC.startswith(caller.data[: len(_MAGIC)]) or caller.transcript):
            self._drop(sock)
        elif len(caller.data) == wanted:
            message, caller.data = caller.data, b""
            (self._prove if caller.transcript else self._open)(sock, caller, message)

    def _open(self, sock: socket.socket, caller: _Caller, message: bytes) -> None:
        claim, nonce, signature = _parts(message)
        caller.claim = _CLAIM.unpack(claim)
        us = self._rank.to_bytes(4, "little")
        if not self._key.verify(signature, b"opening", us, claim, nonce):
            if self._wanted(*caller.claim):  # else a stranger could name ranks without end
                self.refused.add(caller.claim[0])
            _try_to_send(sock, _REFUSAL)
            self._drop(sock)
        elif nonce in self._nonces or not self._wanted(*caller.claim):
            self._drop(sock)
        else:
            self._nonces.add(nonce)
            self._strangers.pop(sock, None)
            own = secrets.token_bytes(_N)
            caller.transcript = (us, claim, nonce, own)
            caller.until = time.monotonic() + self._patience
            if not _try_to_send(sock, own + self._key.sign(b"answer", *caller.transcript)):
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


class Call:
    """One connection to a listener of the job, made without blocking, and again where it breaks before the answer.

    Args:
        selector: of the owner's loop; see `Gate`.
        address: the listener's.
        key: as that of its `Gate`.
        rank: this rank.
        number: of the connection.
        peer: the listener's rank.

    Attributes:
        sock: the connection, once both sides are recognised.
        trouble: what ended the last attempt.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        address: tuple[str, int],
        key: Secret,
        rank: int,
        number: int,
        peer: int,
    ) -> None:
        self.sock: socket.socket | None = None
        self.trouble = "no answer"
        self.peer = peer
        self._selector = selector
        self._address = address
        self._key = key
        self._claim = _CLAIM.pack(rank, number)
        self._attempt: socket.socket | None = None
        self._data = b""
        self._nonce = b""
        self._again_at = 0.0
        self._start()

    def tick(self) -> float:
        """Repeats the call where that is due; returns the seconds after which it wants to be called again.

        Raises:
            OSError: if there is no way to the listener.
        """
        if self.sock is not None or self._attempt is not None:
            return 60.0
        left = self._again_at - time.monotonic()
        if left <= 0:
            self._start()
        return max(0.0, left)

    def close(self) -> None:
        """Ends what is under way; a finished connection is the owner's."""
        if self._attempt is not None:
            self._selector.unregister(self._attempt)
            self._attempt.close()
            self._attempt = None

    def _start(self) -> None:
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        self._attempt = sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_WRITE, self._connected)
        self._data, self._nonce = b"", secrets.token_bytes(_N)
        code = sock.connect_ex(self._address)
        if code not in (0, errno.EINPROGRESS):
            self._broke(OSError(code, errno.errorcode.get(code, str(code))))

    def _connected(self, sock: socket.socket) -> None:
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._broke(OSError(code, f"{self._address[0]}:{self._address[1]}: {errno.errorcode.get(code, code)}"))
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        us = self.peer.to_bytes(4, "little")
        signature = self._key.sign(b"opening", us, self._claim, self._nonce)
        if _try_to_send(sock, _MAGIC + self._claim + self._nonce + signature):
            self._selector.modify(sock, selectors.EVENT_READ, self._answered)
        else:
            self._broke(ConnectionResetError("it hung up"))

    def _answered(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(_ANSWER - len(self._data))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._data += data
        if not data:
            self._broke(ConnectionResetError("it hung up"))
            return
        if len(self._data) < _ANSWER:
            return
        theirs, signature = self._data[:_N], self._data[_N:]
        transcript = (self.peer.to_bytes(4, "little"), self._claim, self._nonce, theirs)
        if self._data == _REFUSAL or not self._key.verify(signature, b"answer", *transcript):
            self.close()
            raise HelloError(
                f"{self._address[0]}:{self._address[1]}, where rank {self.peer} should be, does not know the secret of "
                "this rank: give all ranks the same BAGUA_KERNELS_SECRET, or none of them one"
            )
        if not _try_to_send(sock, self._key.sign(b"proof", *transcript)):
            self._broke(ConnectionResetError("it hung up"))
            return
        self._selector.unregister(sock)
        self.sock, self._attempt = sock, None

    def _broke(self, error: OSError) -> None:
        self.close()
        self.trouble = str(error)
        # A full queue refuses, and a listener beset by strangers hangs up; what else happens does not pass by itself.
        if error.errno not in (errno.ECONNREFUSED, errno.EAGAIN, errno.ECONNRESET, errno.ECONNABORTED, None):
            raise error
        self._again_at = time.monotonic() + _AGAIN


def call(address: tuple[str, int], key: Secret, rank: int, number: int, peer: int, seconds: float) -> socket.socket:
    """Returns a connection to a listener of the job, both sides recognised; blocks.

    Raises:
        OSError: if there is none within the time; `HelloError` if the other side does not know the secret.
    """
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        making = Call(selector, address, key, rank, number, peer)
        try:
            while making.sock is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no connection within {seconds:g} s: {making.trouble}")
                for ready, _ in selector.select(min(left, making.tick())):
                    ready.data(ready.fileobj)
        finally:
            making.close()
        return making.sock


def _parts(message: bytes) -> tuple[bytes, bytes, bytes]:
    """Takes an opening apart: claim, nonce, signature."""
    rest = message[len(_MAGIC) :]
    return rest[: _CLAIM.size], rest[_CLAIM.size : _CLAIM.size + _N], rest[_CLAIM.size + _N :]


def _try_to_send(sock: socket.socket, data: bytes) -> bool:
    """Sends a few bytes on a connection whose buffer is empty; returns whether they went."""
    try:
        return sock.send(data) == len(data)
    except OSError:
        return False
