"""One socket, and what is on its way through it: parts of messages out, messages in."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable

import torch

from bagua_kernels.comm.backends.sockets.transfer import Transfer, memory

# number and code of the operation, tag of the message, offset and length of the part, length of the message
HEADER = struct.Struct("<QQIQQQ")
STAGING = 1 << 16  # bytes read ahead where the next thing is a header; small messages cost one call to the kernel
Key = tuple[int, int, int]  # rank at the other end, number of the operation, tag of the message


class Arrival:
    """A message from another rank: where it goes, what is missing of it, and who has asked for it.

    Attributes:
        own: the memory it goes to, unless that is where it was asked for.
        early: whether it began to arrive before it was asked for.
    """

    __slots__ = ("code", "data", "early", "key", "left", "own", "transfer")

    def __init__(self, key: Key, code: int, transfer: Transfer | None, to: memoryview | torch.Tensor) -> None:
        self.key = key
        self.code = code
        self.transfer = transfer
        self.early = transfer is None
        self.own = to if isinstance(to, torch.Tensor) else None
        self.data = memory(to) if isinstance(to, torch.Tensor) else to
        self.left = len(self.data)


class Part:
    """A part of a message on its way out of one socket."""

    __slots__ = ("header", "rest", "transfer")

    def __init__(self, header: bytes, rest: memoryview, transfer: Transfer) -> None:
        self.header: bytes = header
        self.rest = rest
        self.transfer = transfer


class Channel:
    """One socket, what waits to leave through it, and what has arrived."""

    __slots__ = (
        "arrival", "begin", "end", "expected", "fd", "out", "parked", "peer", "queued", "rest", "sock", "staging", "torn",
        "writing",
    )  # fmt: skip

    def __init__(self, peer: int, sock: socket.socket) -> None:
        self.peer = peer
        self.sock = sock
        self.fd = sock.fileno()
        self.out: deque[Part] = deque()
        self.queued = 0
        self.writing = False
        self.torn = False  # whether bytes may have gone of which there is no note
        self.staging = memoryview(bytearray(STAGING))
        self.begin = self.end = 0
        self.arrival: Arrival | None = None
        self.rest = memoryview(b"")
        self.parked: Key | None = None
        self.expected = 1

    def expect(self, count: int) -> None:
        """Has the kernel report something to read only if so many bytes are there, or the end of the connection."""
        count = max(1, count)
        if count != self.expected:
            # Where it cannot be had, more is reported than need be.
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self.expected = count

    def flush(self, done: Callable[[Transfer], None]) -> bool:
        """Hands the kernel as much as it takes.

        Args:
            done: told each message that it has taken all of.

        Returns:
            Whether something is left.
        """
        self.torn = True
        while self.out:
            part = self.out[0]
            try:
                if part.header:
                    sent = self.sock.sendmsg([part.header, part.rest]) - len(part.header)
                    if sent < 0:
                        part.header = part.header[sent:]
                        continue
                    part.header = b""
                else:
                    sent = self.sock.send(part.rest)
            except BlockingIOError:
                self.torn = False
                return True
            self.queued -= sent
            if sent == len(part.rest):
                self.out.popleft()
                part.transfer.left -= 1
                if not part.transfer.left:
                    done(part.transfer)
            else:
                part.rest = part.rest[sent:]
        self.torn = False
        return False
