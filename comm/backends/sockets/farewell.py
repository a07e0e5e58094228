"""The end of a mailbox's connections: what was sent arrives, and nobody waits for another rank's code."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from bagua_kernels.comm.backends.sockets.channel import Channel
from bagua_kernels.comm.backends.sockets.letters import Kind, LetterChannel
from bagua_kernels.comm.mailbox import LONGEST_LETTER

_LONGEST = 1.0  # seconds; only a host that does not answer makes it last
_CLOSED = 7  # Linux's TCP_CLOSE
_PAUSES = (0.0005, 0.02)  # seconds between two looks at the sockets: the first, and the longest


def say_farewell(channels: Mapping[LetterChannel, Sequence[Channel]], reason: str) -> None:
    """Sends the letters that wait and the reason of the end, and shuts the sockets down; the caller closes them.

    It returns when the other hosts have everything. A socket that is closed with unread bytes resets its connection, which
    would lose what is still to be sent. Tensors that the kernel has not taken are not sent.

    Args:
        channels: for each other rank its letters and its tensors.
        reason: for the other ranks.
    """
    deadline, pause = time.monotonic() + _LONGEST, _PAUSES[0]
    for letters in channels:
        letters.put(Kind.LEAVE, reason.encode()[:LONGEST_LETTER])
    # The reason first: a rank that sees the end of the tensors looks for it. A host that does not answer delays no other's.
    sending, ending = dict(channels), list[Channel]()
    while True:
        for letters in [each for each in sending if _ask(_sent, each)]:
            ending += _shut([letters, *sending.pop(letters)])
        ending = [channel for channel in ending if not _ask(_received, channel)]
        if not sending and not ending:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])
    for letters, tensors in sending.items():
        _shut([letters, *tensors])


def _shut(channels: Iterable[Channel]) -> list[Channel]:
    """Sends the end of the connections to one rank; returns those that had not ended already."""
    found = []
    for channel in channels:
        with contextlib.suppress(OSError):
            channel.sock.shutdown(socket.SHUT_WR)
            found.append(channel)
    return found


def _ask(done: Callable[[Channel], bool], channel: Channel) -> bool:
    try:
        return done(channel)
    except OSError:
        return True


def _sent(channel: Channel) -> bool:
    """Sends frames; returns True if the other host has all of them."""
    return not channel.flush(lambda transfer: None) and not _on_the_way(channel.sock)


def _received(channel: Channel) -> bool:
    """Throws away what arrives; returns True if the other host has everything, and the end of it."""
    try:
        while channel.sock.recv_into(channel.staging):
            pass
    except BlockingIOError:
        return not _on_the_way(channel.sock)
    return True


def _on_the_way(sock: socket.socket) -> int:
    """Returns the number of bytes that the other host has not confirmed; the end counts as one. 0 if it never will."""
    # A connection that the other end has reset keeps its count.
    if sock.family != socket.AF_UNIX and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED:
        return 0
    (count,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, b"\0" * 4))
    return int(count)
