"""Connections that a forked child does not keep: while it had copies, nobody would notice the end of its parent."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

FORKED = (
    "this process was forked, and communicators stay with the process that made them: call comm.init() in a new process"
)
_FOLDER = "/proc/self/fd"


@dataclass
class Sockets:
    """The sockets that a library opened in this process, which does not expose their numbers.

    Attributes:
        found: their file descriptors, and the inodes, which differ once a descriptor is used for something else.
    """

    found: dict[int, int] = field(default_factory=dict)

    @contextlib.contextmanager
    def gather(self) -> Iterator[None]:
        """Takes the sockets that are opened within the block, and marks them as not for programs that are started.

        Sockets that another thread opens meanwhile are taken too; a forked child could hardly share them with its parent.
        """
        before = _sockets()
        yield
        for descriptor, inode in _sockets().items():
            if before.get(descriptor) != inode:
                # Another thread may have closed it since.
                with contextlib.suppress(OSError):
                    flags = fcntl.fcntl(descriptor, fcntl.F_GETFD)
                    fcntl.fcntl(descriptor, fcntl.F_SETFD, flags | fcntl.FD_CLOEXEC)
                    self.found[descriptor] = inode

    def drop(self) -> None:
        """Closes the copies of a forked child; their numbers stay taken, for the library may close them once more."""
        if not self.found:
            return
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        now = _sockets()
        for descriptor, inode in self.found.items():
            if now.get(descriptor) == inode:
                os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
        self.found.clear()


class Forgets(Protocol):
    """An object with resources that a forked child has only copies of."""

    def forget(self) -> None: ...  # noqa: D102


def forget_after_fork(item: Forgets) -> None:
    """Calls `item.forget()` in every child that is forked while the object exists."""
    _forgetting.add(item)


_forgetting: weakref.WeakSet[Forgets] = weakref.WeakSet()


def _forget() -> None:
    for item in list(_forgetting):
        item.forget()


os.register_at_fork(after_in_child=_forget)


def _sockets() -> dict[int, int]:
    """Returns the inodes of this process's sockets by their file descriptors; of none where that cannot be seen."""
    if not os.path.isdir(_FOLDER):
        return {}
    found = {}
    for name in os.listdir(_FOLDER):
        # The descriptor of the listing itself is closed by now.
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found
