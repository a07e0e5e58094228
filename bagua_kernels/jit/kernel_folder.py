"""A folder of compiled kernels: written whole or not at all, read from trusted users only, bounded in size, one lock a kernel.

Loading an entry runs what is in it. So an entry counts only if root or this user owns it, in a folder of root or this user that
nobody else can write.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import stat
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from bagua_kernels import knobs

_DIGEST = hashlib.sha256
_DIGEST_BYTES = _DIGEST().digest_size
_SUFFIX, _LOCK, _UNFINISHED = ".nbc", ".lock", ".tmp"
_WRITES_A_SWEEP = 64  # other processes write as well, so that the folder is measured again after so many entries
_KEPT = 0.9  # of the limit, after a sweep: the next entry is to need none
_DAY, _HOUR = 86_400.0, 3_600.0
_LOOK_EVERY = 0.05  # seconds between two attempts to take a lock of another process


class DamagedEntryError(Exception):
    """A file of the folder does not hold what was written to it, or it is not from a trusted user."""


class KernelFolder:
    """Entries by name, each with a checksum.

    Attributes:
        path: the folder, which the first entry makes.
        limit: bytes of all entries. When they exceed it, those that were not used for longest are removed.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.limit = limit
        self._bytes = 0
        self._writes = 0

    def refusal(self) -> str | None:
        """Why nothing is loaded from this folder, None if entries are or if there is no folder."""
        try:
            found = self.path.stat()
        except OSError as error:
            return None if isinstance(error, FileNotFoundError) else str(error)
        if not stat.S_ISDIR(found.st_mode):
            return f"{self.path} is no folder"
        return _distrust(found, str(self.path))

    def writable(self) -> bool:
        """True if this process can add entries; makes the folder."""
        try:
            self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError:
            return False
        return self.refusal() is None and os.access(self.path, os.R_OK | os.W_OK | os.X_OK)

    def read(self, name: str) -> bytes | None:
        """The content of an entry, None if there is none.

        Raises:
            DamagedEntryError: the file is not what was written, or another user can have written it.
            OSError: the file cannot be read.
        """
        if self.refusal() is not None:
            return None
        try:
            descriptor = os.open(
                self.path / f"{name}{_SUFFIX}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except FileNotFoundError:
            return None
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise DamagedEntryError("it is no file")
            if distrust := _distrust(found, "it"):
                raise DamagedEntryError(distrust)
            content = file.read()
            if time.time() - found.st_mtime > _DAY:
                with contextlib.suppress(OSError):  # root's entries keep their time, for which root is asked in vain
                    os.utime(descriptor)
        if _DIGEST(content[_DIGEST_BYTES:]).digest() != content[:_DIGEST_BYTES]:
            raise DamagedEntryError("its checksum is wrong")
        return content[_DIGEST_BYTES:]

    def write(self, name: str, content: bytes) -> None:
        """Writes an entry, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
        unfinished = self.path / f"{name}.{uuid.uuid4().hex[:16]}{_UNFINISHED}"
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with open(descriptor, "wb") as file:
                # Others must not be able to write it, whatever the umask is.
                os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) & ~0o022)
                file.write(_DIGEST(content).digest() + content)
            os.replace(unfinished, self.path / f"{name}{_SUFFIX}")
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        with _sizes:
            self._bytes += _DIGEST_BYTES + len(content)
            if self._writes % _WRITES_A_SWEEP == 0 or self._bytes > self.limit:
                self._bytes = self._sweep()
            self._writes += 1

    def _sweep(self) -> int:
        """Removes the entries not used for longest, and what writes that failed have left. Returns the bytes of all entries."""
        entries: list[tuple[float, int, str]] = []
        with os.scandir(self.path) as files:
            for file in files:
                with contextlib.suppress(OSError):  # other processes sweep as well
                    found = file.stat(follow_symlinks=False)
                    if file.name.endswith(_SUFFIX) and stat.S_ISREG(found.st_mode):
                        entries.append((found.st_mtime, found.st_size, file.path))
                    elif file.name.endswith(_UNFINISHED) and time.time() - found.st_mtime > _HOUR:
                        os.unlink(file.path)
        total = sum(size for _, size, _ in entries)
        if total > self.limit:
            for _, size, path in sorted(entries):
                with contextlib.suppress(OSError):
                    os.unlink(path)
                total -= size
                if total <= _KEPT * self.limit:
                    break
        return total

    @contextlib.contextmanager
    def turn(self, name: str, *, patience: float, give_way: Callable[[], bool]) -> Iterator[None]:
        """Holds the lock of an entry, which one thread of one process at a time has.

        Goes on without it where the file system has no locks, and when it was waited for long enough.

        Args:
            name: of the entry.
            patience: seconds for which another's turn is waited for.
            give_way: True if another thread of this process must not be waited for: it may wait for this one.
        """
        path = self.path / f"{name}{_LOCK}"
        descriptor = _locked(path, time.monotonic() + patience, give_way)
        try:
            yield
        finally:
            if descriptor is not None:
                _unlock(path, descriptor)


# The paths whose locks this process has, with the descriptors of their files.
_held: dict[Path, int] = {}
_released = threading.Condition()
# Of the sizes of all folders.
_sizes = threading.Lock()


def _forget_turns() -> None:
    """For a forked process, in which nobody will end the turns of its parent's threads.

    A lock lasts as long as any process has its file open, and the parent may end without unlocking it.
    """
    global _released, _sizes
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()
    _released, _sizes = threading.Condition(), threading.Lock()


os.register_at_fork(after_in_child=_forget_turns)


def _locked(path: Path, deadline: float, give_way: Callable[[], bool]) -> int | None:
    """The descriptor of the lock file, which this thread has locked; None to go on without."""
    while True:
        with _released:
            if path in _held:
                if give_way() or time.monotonic() > deadline:
                    return None
                _released.wait(_LOOK_EVERY)
                continue
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            except OSError:
                return None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The holder before may have removed the file since it was opened here.
                if os.fstat(descriptor).st_ino == path.stat().st_ino:
                    _held[path] = descriptor
                    return descriptor
                busy = False
            except FileNotFoundError:
                busy = False
            except BlockingIOError:
                busy = True
            except OSError:
                os.close(descriptor)
                return None
            os.close(descriptor)
        if busy:
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_EVERY)


def _unlock(path: Path, descriptor: int) -> None:
    with _released:
        with contextlib.suppress(OSError):
            path.unlink()
        # Closing alone would leave the lock to children that were forked meanwhile.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
        del _held[path]
        _released.notify_all()


def _distrust(found: os.stat_result, name: str) -> str | None:
    """Why a file or a folder may hold what another user has written; None if it cannot."""
    own = os.geteuid()
    if found.st_uid not in (0, own):
        return f"{name} belongs to user {found.st_uid}, expected {own} or root"
    if found.st_mode & 0o022:
        return f"{name} can be written by other users (mode {stat.S_IMODE(found.st_mode):o}); run chmod go-w"
    return None


def user_folder() -> Path | None:
    """The folder of this user's caches, None for a user without a home."""
    if sys.platform == "darwin":
        parts: tuple[str, ...] = ("Library", "Caches")
    else:
        given = Path(knobs.XDG_CACHE_HOME.get())
        if given.is_absolute():
            return given
        parts = (".cache",)
    try:
        return Path.home().joinpath(*parts)
    except RuntimeError:
        return None


def folders(given: str) -> tuple[tuple[KernelFolder, ...], KernelFolder | None]:
    """Returns the folders to load kernels from, in order, and the one to save them in, which is None if none can be written.

    Args:
        given: the folder that the user names, in which a folder `bagua_kernels` is used. Only where that cannot be written, or
            without a name, the folder of the user's caches serves.
    """
    return _folders_of(given, os.geteuid())


@functools.cache
def _folders_of(given: str, user: int) -> tuple[tuple[KernelFolder, ...], KernelFolder | None]:
    # A process that becomes another user may write other folders.
    limit = knobs.CACHE_MB.get() * 1_000_000
    found = [KernelFolder(Path(given) / "bagua_kernels", limit)] if given else []
    if (not found or not found[0].writable()) and (own := user_folder()):
        found.append(KernelFolder(own / "bagua_kernels", limit))
    return tuple(found), next((folder for folder in found if folder.writable()), None)
