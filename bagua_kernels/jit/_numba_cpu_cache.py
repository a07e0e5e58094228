"""Compiled kernels on disk: damaged entries are replaced, a full disk does no harm, one process per host compiles a kernel.

Numba's own cache raises an error if an entry cannot be read or written. Processes that start together each compile the same
kernel. If two processes write one index at the same time, it can return the code of another signature. This cache has one
file per kernel and signature, with a checksum, in the folders that Numba chooses (`NUMBA_CACHE_DIR`, or beside the
sources).
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import pickle
import time
from pathlib import Path
from typing import IO, Any

from numba.core import event
from numba.core.caching import FunctionCache, IndexDataCacheFile

from bagua_kernels.jit import compiling

logger = logging.getLogger(__name__)

_DIGEST = hashlib.sha256
_DIGEST_BYTES = _DIGEST().digest_size
_LONGEST_WAIT = 120.0  # seconds for which another process's compilation is waited for
_LOOK_EVERY = 0.05


class DamagedEntryError(Exception):
    """A file of the cache does not hold what was written to it."""


class KernelFiles(IndexDataCacheFile):  # type: ignore[misc]
    """One file for each signature of a kernel: a SHA-256 checksum, then the pickled key and code."""

    def path_of(self, key: Any) -> Path:
        """The file that holds the code for `key`."""
        name = self._index_name.removesuffix(".nbi")
        return Path(self._cache_path) / f"{name}.{_DIGEST(repr(key).encode()).hexdigest()[:16]}.nbc"

    def flush(self) -> None:
        """Removes all entries."""
        for path in Path(self._cache_path).glob(f"{self._index_name.removesuffix('.nbi')}.*.nbc"):
            path.unlink(missing_ok=True)

    def save(self, key: Any, data: Any) -> None:
        """Writes an entry, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        content = self._dump((self._version, self._source_stamp, key, data))
        with self._open_for_write(str(self.path_of(key))) as file:
            file.write(_DIGEST(content).digest() + content)

    def load(self, key: Any) -> Any:
        """An entry; None if there is none, or it was made of other sources or by another Numba.

        Raises:
            DamagedEntryError: the file is not what was written.
            OSError: the file cannot be read.
        """
        try:
            content = self.path_of(key).read_bytes()
        except FileNotFoundError:
            return None
        # Checked before anything is unpickled, let alone run.
        if _DIGEST(content[_DIGEST_BYTES:]).digest() != content[:_DIGEST_BYTES]:
            raise DamagedEntryError("its checksum is wrong")
        version, stamp, saved, data = pickle.loads(content[_DIGEST_BYTES:])
        return data if (version, stamp, saved) == (self._version, self._source_stamp, key) else None


class KernelCache(FunctionCache):  # type: ignore[misc]
    """A kernel's cache for Numba's dispatcher, which calls it with Numba's lock for compilers held.

    The first process to take the kernel's lock file compiles a missing entry. The others wait for it and load the entry that
    it has saved.
    """

    def __init__(self, function: Any) -> None:
        """As Numba's own; raises a RuntimeError if there is no folder to write to."""
        super().__init__(function)
        self._cache_file = KernelFiles(
            self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp()
        )
        self._lock: IO[bytes] | None = None
        self._compiling = False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code for a signature; None if this process has to compile it."""
        found = self._sound(sig, target_context)
        if found is not None or not self._enabled:
            return found
        self.end()
        self._compiling = True
        compiling.begin(self._cache_path)
        self._lock, waited = _locked(Path(self._cache_path) / f"{self._impl.filename_base}.lock")
        found = self._sound(sig, target_context) if waited else None
        if found is not None:
            self.end()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Saves what has been compiled; a warning is logged if that fails."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            logger.warning(
                "a compiled kernel could not be saved, so that it is compiled anew at each start (free some space in %s, or "
                "set NUMBA_CACHE_DIR to another folder): %s",
                self._cache_path,
                error,
            )
        finally:
            self.end()

    def end(self) -> None:
        """Lets other processes have the kernel; harmless if there is no compilation under way."""
        if self._lock is not None:
            # Closing alone would leave the lock to children that were forked meanwhile.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()
            self._lock = None
        if self._compiling:
            self._compiling = False
            compiling.end()

    def _sound(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # unpickling and linking raise anything
            logger.warning(
                "the compiled kernel %s in %s cannot be used, and is compiled anew and replaced: %s: %s",
                self._impl.filename_base,
                self._cache_path,
                type(error).__name__,
                error,
            )
            return None


class _Failures(event.Listener):  # type: ignore[misc]
    """Ends a compilation that raised, after which Numba saves nothing."""

    def on_start(self, event: Any) -> None:
        """Does nothing."""

    def on_end(self, event: Any) -> None:
        cache = getattr(event.data["dispatcher"], "_cache", None)
        # Its property `is_failed` is true of what has succeeded, in Numba 0.61 to 0.68.
        if event._exc_details is not None and isinstance(cache, KernelCache):
            cache.end()


event.register("numba:compile", _Failures())


def keep_on_disk(dispatcher: Any) -> None:
    """Gives a function of `numba.njit` this cache.

    Raises:
        RuntimeError: neither the folder of its source nor the user's cache can be written.
    """
    dispatcher._cache = KernelCache(dispatcher.py_func)


def _locked(path: Path) -> tuple[IO[bytes] | None, bool]:
    """Takes a lock file.

    Returns:
        The open file, or None if the file system has no locks or another process does not end. The second value is True if
        another process had the lock meanwhile.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab")  # noqa: SIM115 - it is closed at the end of the compilation
    except OSError:
        return None, False
    deadline = time.monotonic() + _LONGEST_WAIT
    waited = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
        except OSError:
            break
        else:
            return file, waited
        if time.monotonic() > deadline:
            break
        time.sleep(_LOOK_EVERY)
    file.close()
    return None, waited
