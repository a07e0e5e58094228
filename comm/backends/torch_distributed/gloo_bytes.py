"""How many bytes have moved through Gloo's sockets, which Gloo itself does not count."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Mapping

_COUNTS = struct.Struct("<QQ")  # bytes that the other end has confirmed, and bytes that have arrived
_OFFSET = 120  # of these in Linux's tcp_info
_LENGTH = 256


def bytes_through(sockets: Mapping[int, int]) -> int:
    """Returns the bytes that have left or arrived through some sockets; 0 where the system does not count them.

    Args:
        sockets: the inode of each by its file descriptor.
    """
    if not hasattr(socket, "TCP_INFO"):
        return 0
    total = 0
    for descriptor, inode in list(sockets.items()):
        # It may have been closed meanwhile, and its number be that of something else.
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino != inode:
                continue
            sock = socket.socket(fileno=descriptor)
            try:
                told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
            finally:
                sock.detach()
            if len(told) >= _OFFSET + _COUNTS.size:
                total += sum(_COUNTS.unpack_from(told, _OFFSET))
    return total
