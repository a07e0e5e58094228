"""One socket, and what is on its way through it: parts of messages out, messages in."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable

from bagua_kernels.comm.backends.sockets.inbox import Arrival, Inbox, Key
from bagua_kernels.comm.backends.sockets.transfer import Transfer

# context, number and code of the operation, tag of the message, offset and length of the frame, length of the message
HEADER = struct.Struct("<QQQIQQQ")
FAREWELL = (1 << 64) - 1  # in place of a number: the sender has left the context; what follows is the reason
LONGEST_REASON = 4096  # bytes
# Bytes that leave a socket together: as long as another communicator's next message may have to wait. A large message of one
# must not keep the small ones of others until all of it has gone. Halving it costs some percent more processor time a byte.
FRAME = 1 << 19
STAGING = 1 << 16  # bytes read ahead where the next thing is a header; small messages cost one call to the kernel
_WASTE = memoryview(bytearray(STAGING))  # where bytes go that nobody wants


class MessagePart:
    """A part of a message on its way out of one socket, frame by frame.

    Args:
        number: of the operation, with its context.
        code: of the operation.
        tag: of the message.
        offset: of the part in the message.
        data: the bytes of the part.
        total: bytes of the message.
        transfer: counts the parts that have not gone; None for a farewell.
        most: bytes of a frame.

    Attributes:
        header: what has not gone yet of the header of the frame that is leaving.
        frame: what has not gone yet of its bytes.
        rest: the frames behind it.
    """

    __slots__ = ("_code", "_most", "_next", "_number", "_tag", "_total", "frame", "header", "rest", "transfer")

    def __init__(
        self, number: int, code: int, tag: int, offset: int, data: memoryview, total: int, transfer: Transfer | None, most: int
    ) -> None:  # fmt: skip
        self._number, self._code, self._tag, self._total = number, code, tag, total
        self._next, self._most = offset, most
        self.rest = data
        self.transfer = transfer
        self.cut()

    def cut(self) -> None:
        """Begins the next frame."""
        self.frame, self.rest = self.rest[: self._most], self.rest[self._most :]
        context, number = divmod(self._number, 1 << 64)
        self.header: bytes = HEADER.pack(
            context, number, self._code, self._tag, self._next, len(self.frame), self._total
        )
        self._next += len(self.frame)

    def detach(self) -> None:
        """Copies what is left, so that its memory may be used for something else."""
        self.frame, self.rest = memoryview(bytes(self.frame)), memoryview(bytes(self.rest))

    def count(self, sent: int) -> None:
        """Counts bytes that have gone."""
        if self.transfer is not None:
            operation = self.transfer.lane.operation
            operation.moved += sent
            if operation.context is not None:
                operation.context.moved += sent


class Channel:
    """One socket, what waits to leave through it, and what has arrived.

    Contexts take turns: after each frame of one that has more to send comes one of the next.

    Args:
        peer: the rank at the other end.
        sock: connected, and from now on the channel's.
        frame: bytes of a frame at most.

    Attributes:
        moved: bytes of messages that have left or arrived.
        out: by context the parts that wait to leave; the context whose turn it is comes first.
    """

    __slots__ = (
        "_frame", "arrival", "begin", "end", "expected", "fd", "moved", "out", "parked", "peer", "queued", "rest", "sock",
        "staging", "torn", "unwanted", "writing",
    )  # fmt: skip

    def __init__(self, peer: int, sock: socket.socket, frame: int = FRAME) -> None:
        self.peer = peer
        self.sock = sock
        self.fd = sock.fileno()
        self._frame = frame
        self.out: dict[int, deque[MessagePart]] = {}
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

    def append(
        self, number: int, code: int, tag: int, offset: int, data: memoryview, total: int, transfer: Transfer | None
    ) -> None:  # fmt: skip
        """Appends a part of a message, which `flush` sends; see `MessagePart`."""
        part = MessagePart(number, code, tag, offset, data, total, transfer, self._frame)
        self.out.setdefault(number >> 64, deque()).append(part)
        self.queued += len(data)

    def flush(self, done: Callable[[Transfer], None]) -> bool:
        """Hands the kernel as much as it takes.

        Args:
            done: called with each message that it has taken all of.

        Returns:
            True if bytes are left.
        """
        self.torn = True
        while self.out:
            context, parts = next(iter(self.out.items()))
            part = parts[0]
            try:
                if part.header:
                    sent = self.sock.sendmsg([part.header, part.frame]) - len(part.header)
                    if sent < 0:
                        part.header = part.header[sent:]
                        continue
                    part.header = b""
                else:
                    sent = self.sock.send(part.frame)
            except BlockingIOError:
                self.torn = False
                return True
            self.queued -= sent
            self.moved += sent
            part.count(sent)
            if sent < len(part.frame):
                part.frame = part.frame[sent:]
                continue
            if len(part.rest):
                part.cut()
            else:
                # Even an empty view would keep the tensor's memory.
                part.frame = part.rest = memoryview(b"")
                parts.popleft()
                if part.transfer is not None:
                    part.transfer.left -= 1
                    if not part.transfer.left:
                        done(part.transfer)
            if not parts:
                self.out.pop(context, None)
            elif len(self.out) > 1:
                self.out[context] = self.out.pop(context)
        self.torn = False
        return False

    def leave(self, context: int, reason: bytes) -> None:
        """Withdraws what has not begun to leave of a context, and appends its farewell."""
        parts = self.out.get(context, deque())
        begun = parts[0] if parts and len(parts[0].header) < HEADER.size else None
        for part in parts:
            self.queued -= len(part.rest) + (0 if part is begun else len(part.frame))
        parts.clear()
        if begun is not None:
            # A frame has to end before another one begins.
            begun.frame, begun.rest, begun.transfer = memoryview(bytes(begun.frame)), memoryview(b""), None
            parts.append(begun)
        reason = reason[:LONGEST_REASON]
        self.out.setdefault(context, parts)
        self.append(context << 64 | FAREWELL, 0, 0, 0, memoryview(reason), len(reason), None)

    def forsake(self, context: int) -> None:
        """Throws away what is still to come of the message that is arriving, if it is of a context."""
        if self.arrival is not None and self.arrival.key[1] >> 64 == context:
            self.discard()

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
            wanted = len(self.rest)
            if self.arrival is not None:
                # With the header behind it, and no more: what follows that goes straight to its place, too.
                into, most = [self.rest, self.staging[: HEADER.size]], wanted + HEADER.size
            else:
                into = [self.rest if wanted else self.staging[self.end :]]
                most = len(into[0])
            try:
                count = self.sock.recvmsg_into(into)[0]
            except BlockingIOError:
                break
            if not count:
                raise ConnectionResetError("it was closed at the other end")
            taken += count
            self.moved += count
            if wanted:
                self._filled(inbox, min(count, wanted))
            if count > wanted:
                self.end += count - wanted
                self.parse(inbox)
            if count < most:
                break
        return taken

    def parse(self, inbox: Inbox) -> bool:
        """Takes headers, and what follows each, out of what was read ahead; returns True if it has stopped (`parked`).

        Raises:
            OSError: if what arrives is no message.
        """
        while self.end - self.begin >= HEADER.size:
            context, number, code, tag, offset, length, total = HEADER.unpack_from(self.staging, self.begin)
            if number == FAREWELL:
                if length > LONGEST_REASON:
                    raise ConnectionAbortedError(f"expected a reason of at most {LONGEST_REASON} bytes, got {length}")
                begin, end = self.begin + HEADER.size, self.begin + HEADER.size + length
                if end > self.end:
                    break
                self.begin = end
                inbox.departs(self.peer, context, bytes(self.staging[begin:end]).decode(errors="replace"))
                continue
            if number < inbox.below or context in inbox.closed:
                self.begin += HEADER.size
                self._skip(length)
            else:
                key = (self.peer, context << 64 | number, tag)
                arrival = inbox.place(key, code, total)
                if arrival is None:
                    self.parked = key
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
        if arrival.context is not None:
            arrival.context.moved += count
        if arrival.transfer is not None:
            arrival.transfer.lane.operation.moved += count
        if not len(self.rest):
            # Even an empty view would keep the tensor's memory.
            self.rest, self.arrival = memoryview(b""), None
            if not arrival.left:
                inbox.arrived(arrival)
