"""Short messages on a socket of their own, which no tensor delays."""

from __future__ import annotations

import enum
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from bagua_kernels.comm.backends.sockets.channel import Channel
from bagua_kernels.comm.backends.sockets.inbox import Inbox
from bagua_kernels.comm.backends.sockets.transfer import Transfer
from bagua_kernels.comm.mailbox import LONGEST_LETTER

_FRAME = struct.Struct("<BI")  # kind, length of what follows


class Kind(enum.IntEnum):
    """What a frame is."""

    LETTER = 0
    LEAVE = 1  # the sender's last frame; what follows is the reason
    PING = 2
    PONG = 3  # the answer; what follows are the ranks that the sender waits for
    ASK = 4
    TOLD = 5  # the answer; what follows is what the sender has moved, and how many exchanges it has begun


class LetterChannel(Channel):
    """The socket of the letters to and from one rank.

    Attributes:
        frames: what waits to leave.
        deliver: called with the rank, the kind and the contents of each frame that arrives.
    """

    __slots__ = ("deliver", "frames", "received")

    def __init__(self, peer: int, sock: socket.socket, deliver: Callable[[int, int, bytes], None]) -> None:
        super().__init__(peer, sock)
        self.frames: deque[memoryview] = deque()
        self.received = bytearray()
        self.deliver = deliver

    def put(self, kind: Kind, contents: bytes) -> None:
        """Appends a frame; `flush` sends it."""
        self.frames.append(memoryview(_FRAME.pack(kind, len(contents)) + contents))

    def flush(self, done: Callable[[Transfer], None]) -> bool:
        """Hands the kernel as much as it takes; returns True if frames are left."""
        self.torn = True
        while self.frames:
            try:
                sent = self.sock.send(self.frames[0])
            except BlockingIOError:
                break
            if sent == len(self.frames[0]):
                self.frames.popleft()
            else:
                self.frames[0] = self.frames[0][sent:]
        self.torn = False
        return bool(self.frames)

    def read(self, inbox: Inbox, limit: int) -> int:
        """Delivers what has arrived; returns the number of bytes that it took.

        Raises:
            OSError: if the connection has ended, or what arrives is not a frame.
        """
        try:
            data = self.sock.recv(len(self.staging))
        except BlockingIOError:
            return 0
        if not data:
            raise ConnectionResetError("it was closed at the other end")
        self.received += data
        begin = 0
        while len(self.received) - begin >= _FRAME.size:
            kind, length = _FRAME.unpack_from(self.received, begin)
            if length > LONGEST_LETTER or kind > Kind.TOLD:
                raise ConnectionAbortedError(f"expected a letter, got a frame of kind {kind} with {length} bytes")
            end = begin + _FRAME.size + length
            if end > len(self.received):
                break
            contents = bytes(self.received[begin + _FRAME.size : end])
            begin = end
            self.deliver(self.peer, kind, contents)
        del self.received[:begin]
        return len(data)


class LetterBox:
    """The letters that have arrived and not been taken."""

    def __init__(self) -> None:
        self._letters: deque[tuple[int, bytes]] = deque()
        self._changed = threading.Condition()
        self._ended = self._woken = False

    def put(self, sender: int, letter: bytes) -> None:
        """Adds a letter."""
        with self._changed:
            self._letters.append((sender, letter))
            self._changed.notify()

    def wake(self) -> None:
        """Lets the next call of `take`, or the one that waits, return None at once if there is no letter."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def look(self) -> None:
        """Lets threads that wait look whether what they wait for makes sense."""
        with self._changed:
            self._changed.notify_all()

    def take(self, timeout: float, vain: Callable[[], bool] | None = None) -> tuple[int, bytes] | None:
        """Returns the next letter and its sender; None if none comes in time, or after the end.

        Args:
            timeout: seconds to wait.
            vain: called at first and after each `look`; the wait ends when it returns True.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._ended:
                if self._letters:
                    return self._letters.popleft()
                left = deadline - time.monotonic()
                if self._woken or left <= 0 or (vain is not None and vain()):
                    self._woken = False
                    break
                self._changed.wait(left)
        return None

    def remove(self, senders: frozenset[int]) -> None:
        """Frees the letters of some ranks."""
        with self._changed:
            kept = [letter for letter in self._letters if letter[0] not in senders]
            self._letters.clear()
            self._letters.extend(kept)

    def end(self) -> None:
        """Frees all letters and wakes all threads that wait."""
        with self._changed:
            self._ended = True
            self._letters.clear()
            self._changed.notify_all()

    def forget(self) -> None:
        """Ends it in a forked child, where a thread that no longer exists may have held the lock."""
        self._changed = threading.Condition()
        self.end()
