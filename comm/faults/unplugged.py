"""A process whose network is cut for a while, without rights of an administrator."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import time
from pathlib import Path

_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux
_RETURN = 0x06  # the instruction of a filter that ends it, with the number of bytes to keep
_AGAIN = 0.02  # seconds between two looks for new sockets
_FOLDER = Path("/proc/self/fd")


def unplug(seconds: float) -> None:
    """Lets nothing reach the TCP sockets of this process for a while; blocks. Only on Linux.

    A filter on each socket keeps no byte of any packet. So acknowledgements are lost as well: after a few packets that still go
    out, the kernel sends nothing new either. Afterwards connections go on as behind a cable that was plugged in again: the
    kernel has doubled its wait with every try.

    Raises:
        OSError: the kernel has no such filters.
    """
    keeps_nothing = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(keeps_nothing))
    cut: dict[int, socket.socket] = {}
    end = time.monotonic() + seconds
    try:
        while (left := end - time.monotonic()) > 0:
            for number, each in _tcp_sockets().items():
                if number in cut:
                    each.close()
                    continue
                each.setsockopt(socket.SOL_SOCKET, _ATTACH, program)
                cut[number] = each
            time.sleep(min(_AGAIN, left))
    finally:
        for each in cut.values():
            with contextlib.suppress(OSError), each:  # its connection has ended meanwhile
                each.setsockopt(socket.SOL_SOCKET, _DETACH, 0)


def _tcp_sockets() -> dict[int, socket.socket]:
    """Returns duplicates of all that this process has open, by their numbers in the kernel."""
    found: dict[int, socket.socket] = {}
    for name in os.listdir(_FOLDER):
        with contextlib.suppress(OSError):  # closed by another thread
            target = os.readlink(_FOLDER / name)
            if not target.startswith("socket:") or (number := int(target[8:-1])) in found:
                continue
            each = socket.socket(fileno=os.dup(int(name)))
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                found[number] = each
            else:
                each.close()
    return found
