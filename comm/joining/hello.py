"""How a process of the job calls another one: both prove that they know the job's secret before anything else is read.

The caller opens with a nonce, its rank and the number of the connection, signed. The listener (`gate`) answers with its
own nonce and a signature of both. The caller then signs both. Each signature covers the role, both ranks and the number,
so that it can be neither reflected nor used elsewhere. It covers both nonces, so that it cannot be replayed.
"""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import struct
import time

from bagua_kernels.comm.joining.secret import Secret

MAGIC = b"bagua\x00\x01\n"
CLAIM = struct.Struct("<II")  # rank of the caller, number of the connection
OPENING = len(MAGIC) + CLAIM.size + 2 * Secret.NBYTES  # magic, claim, nonce, signature
ANSWER = 2 * Secret.NBYTES  # nonce, signature
REFUSAL = b"bagua_kernels: this job has another secret".ljust(ANSWER)
_AGAIN = 0.05  # seconds before a call is repeated


class HelloError(OSError):
    """The other side of a connection does not know the job's secret."""


def split_opening(message: bytes) -> tuple[bytes, bytes, bytes]:
    """Returns the claim, the nonce and the signature of an opening."""
    rest = message[len(MAGIC) :]
    nonce = CLAIM.size + Secret.NBYTES
    return rest[: CLAIM.size], rest[CLAIM.size : nonce], rest[nonce:]


def try_to_send(sock: socket.socket, data: bytes) -> bool:
    """Sends a few bytes on a connection whose buffer is empty; returns True if they went."""
    try:
        return sock.send(data) == len(data)
    except OSError:
        return False


def receive(sock: socket.socket, size: int) -> bytes | None:
    """Returns at most `size` bytes of what has arrived: none if the connection has ended, None if nothing is here yet."""
    try:
        return sock.recv(size)
    except BlockingIOError:
        return None
    except OSError:
        return b""


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
        refusals: how often in a row nobody listened.
        sock: the connection, once both sides are recognised.
        trouble: why the last connection was not made.
    """

    def __init__(
        self, selector: selectors.BaseSelector, address: tuple[str, int], key: Secret, rank: int, number: int, peer: int
    ) -> None:
        self.sock: socket.socket | None = None
        self.trouble = "no answer"
        self.peer, self.refusals = peer, 0
        self._selector = selector
        self._address = address
        self._key = key
        self._claim = CLAIM.pack(rank, number)
        self._connecting: socket.socket | None = None
        self._data = b""
        self._nonce = b""
        self._again_at = 0.0
        self._start()

    def tick(self) -> float:
        """Repeats the call where that is due; returns the seconds after which it wants to be called again.

        Raises:
            OSError: if there is no way to the listener.
        """
        if self.sock is not None or self._connecting is not None:
            return 60.0
        left = self._again_at - time.monotonic()
        if left <= 0:
            self._start()
        return max(0.0, left)

    def close(self) -> None:
        """Ends what is under way; a finished connection is the owner's."""
        if self._connecting is not None:
            self._selector.unregister(self._connecting)
            self._connecting.close()
            self._connecting = None

    def _start(self) -> None:
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        self._connecting = sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_WRITE, self._connected)
        self._data, self._nonce = b"", secrets.token_bytes(Secret.NBYTES)
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
        if try_to_send(sock, MAGIC + self._claim + self._nonce + signature):
            self._selector.modify(sock, selectors.EVENT_READ, self._answered)
        else:
            self._broke(ConnectionResetError("it hung up"))

    def _answered(self, sock: socket.socket) -> None:
        data = receive(sock, ANSWER - len(self._data))
        if data is None:
            return
        self._data += data
        if not data:
            self._broke(ConnectionResetError("it hung up"))
            return
        if len(self._data) < ANSWER:
            return
        theirs, signature = self._data[: Secret.NBYTES], self._data[Secret.NBYTES :]
        transcript = (self.peer.to_bytes(4, "little"), self._claim, self._nonce, theirs)
        if self._data == REFUSAL or not self._key.verify(signature, b"answer", *transcript):
            self.close()
            raise HelloError(
                f"{self._address[0]}:{self._address[1]}, where rank {self.peer} should be, does not know the secret of "
                "this rank: give all ranks the same BAGUA_KERNELS_SECRET, or none of them one"
            )
        if not try_to_send(sock, self._key.sign(b"proof", *transcript)):
            self._broke(ConnectionResetError("it hung up"))
            return
        self._selector.unregister(sock)
        self.sock, self._connecting = sock, None

    def _broke(self, error: OSError) -> None:
        self.close()
        self.trouble = str(error)
        self.refusals = self.refusals + 1 if error.errno == errno.ECONNREFUSED else 0
        # A full queue refuses, and a listener beset by strangers hangs up; what else happens does not pass by itself.
        if error.errno not in (errno.ECONNREFUSED, errno.EAGAIN, errno.ECONNRESET, errno.ECONNABORTED, None):
            raise error
        self._again_at = time.monotonic() + _AGAIN


def call(
    address: tuple[str, int],
    key: Secret,
    rank: int,
    number: int,
    peer: int,
    seconds: float,
    refusals: int | None = None,
) -> socket.socket:
    """Returns a connection to a listener of the job, both sides recognised; blocks.

    Args:
        address: as for `Call`.
        key: likewise.
        rank: likewise.
        number: likewise.
        peer: likewise.
        seconds: after which it gives up.
        refusals: in a row, after which it gives up; None for any number.

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
                if refusals is not None and making.refusals >= refusals:
                    raise ConnectionRefusedError(f"nobody listens there: {making.trouble}")
                for ready, _ in selector.select(min(left, making.tick())):
                    ready.data(ready.fileobj)
        finally:
            making.close()
        return making.sock
