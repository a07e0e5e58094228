"""One socket, and what is on its way through it: parts of messages out, messages in."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable

from bagua_kernels.comm.backends.sockets.inbox import Arrival, Inbox, Key
from bagua_kernels.comm.backends.sockets.transfer import Transfer

# number and code of the operation, tag of the message, offset and length of the part, length of the message
HEADER = struct.Struct("<QQIQQQ")
STAGING = 1 << 16  # bytes read ahead where the next thing is a header; small messages cost one call to the kernel
_WASTE = memoryview(bytearray(STAGING))  # where bytes go that nobody wants


class MessagePart:
    """A part of a message on its way out of one socket."""

    __slots__ = ("header", "rest", "transfer")

    def __init__(self, header: bytes, rest: memoryview, transfer: Transfer) -> None:
        self.header: bytes = header
        self.rest = rest
        self.transfer = transfer


class Channel:
    """One socket, what waits to leave through it, and what has arrived.

    Attributes:
        moved: bytes of messages that have left or arrived.
    """

    __slots__ = (
        "arrival", "begin", "end", "expected", "fd", "moved", "out", "parked", "peer", "queued", "rest", "sock", "staging",
        "torn", "unwanted", "writing",
    )  # fmt: skip

    def __init__(self, peer: int, sock: socket.socket) -> None:
        self.peer = peer
        self.sock = sock
        self.fd = sock.fileno()
        self.out: deque[MessagePart] = deque()
        self.queued = self.moved = 0
        self.writing = False
        self.torn = False  # True if bytes may have been sent that were not counted
        self.staging = memoryview(bytearray(STAGING))
        self.begin = self.end = 0
        self.arrival: Arrival | None = None
        self.rest = memoryview(b"")
        self.parked: Key | None = None
        self.unwanted = 0  # bytes that come next and are thrown away
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
            done: called with each message that it has taken all of.

        Returns:
            True if bytes are left.
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
            self.moved += sent
            part.transfer.lane.operation.moved += sent
            if sent == len(part.rest):
                self.out.popleft()
                part.transfer.left -= 1
                if not part.transfer.left:
                    done(part.transfer)
            else:
                part.rest = part.rest[sent:]
        self.torn = False
        return False

    def discard(self) -> None:
        """Throws away what is still to come of the message that is arriving."""
        self.arrival = None
        self._skip(len(self.rest))

    def read(self, inbox: Inbox, limit: int) -> int:
        """Takes what has arrived, about `limit` bytes at most; stops where `inbox` has no room for a message (`parked`).

        Returns:
            The number of bytes that it took.

        Raises:
            OSError: if the connection has ended.
        """
        taken = 0
        while taken < limit and self.parked is None:
            into = self.rest if len(self.rest) else self.staging[self.end :]
            try:
                count = self.sock.recv_into(into)
            except BlockingIOError:
                break
            if not count:
                raise ConnectionResetError("it was closed at the other end")
            taken += count
            self.moved += count
            if len(self.rest):
                self._filled(inbox, count)
            else:
                self.end += count
                self.parse(inbox)
            if count < len(into):
                break
        return taken

    def parse(self, inbox: Inbox) -> bool:
        """Takes headers, and what follows each, out of what was read ahead; returns True if it has stopped (`parked`)."""
        while self.end - self.begin >= HEADER.size:
            number, code, tag, offset, length, total = HEADER.unpack_from(self.staging, self.begin)
            if number < inbox.below:
                self.begin += HEADER.size
                self._skip(length)
            else:
                arrival = inbox.place((self.peer, number, tag), code, total)
                if arrival is None:
                    self.parked = (self.peer, number, tag)
                    break
                self.begin += HEADER.size
                self.arrival = arrival
                self.rest = arrival.data[offset : offset + length]
            count = min(length, self.end - self.begin)
            self.rest[:count] = self.staging[self.begin : self.begin + count]
            self.begin += count
            self._filled(inbox, count)
            if len(self.rest):
                break
        # What is left is less than a header, or waits for its operation.
        left = self.end - self.begin
        if self.begin:
            self.staging[:left] = bytes(self.staging[self.begin : self.end])
        self.begin, self.end = 0, left
        return self.parked is not None

    def _skip(self, count: int) -> None:
        self.unwanted = count
        self.rest = _WASTE[: min(count, STAGING)]

    def _filled(self, inbox: Inbox, count: int) -> None:
        arrival = self.arrival
        self.rest = self.rest[count:]
        if arrival is None:
            self.unwanted -= count
            if not len(self.rest):
                self._skip(self.unwanted)
            return
        arrival.left -= count
        if arrival.transfer is not None:
            arrival.transfer.lane.operation.moved += count
        if not len(self.rest):
            # Even an empty view would keep the tensor's memory.
            self.rest, self.arrival = memoryview(b""), None
            if not arrival.left:
                inbox.arrived(arrival)
