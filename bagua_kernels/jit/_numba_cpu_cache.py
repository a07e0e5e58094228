"""Compiled kernels on disk, named by the digest of all that they are made of: no path and no date of a file counts.

Numba's own cache raises an error if an entry cannot be read or written, and compiles the same sources in another folder anew.
Processes that start together each compile the same kernel there. Here, the first one to take a kernel's turn compiles it, and
the others wait for its entry. They wait without the compiler's lock, so that their other threads go on.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding
import numba
import numpy
from numba.core import config
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.serialize import dumps

from bagua_kernels.jit import compiling
from bagua_kernels.jit.kernel_folder import DamagedEntryError, KernelFolder, folders
from bagua_kernels.jit.log import warn_once

logger = logging.getLogger(__name__)

_LONGEST_WAIT = 120.0  # seconds for which another process's compilation is waited for

# What changes the code that Numba makes of the same sources for the same processor.
_SETTINGS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "USING_SVML")


@functools.cache
def _compiler() -> str:
    settings = [(name, getattr(config, name, None)) for name in _SETTINGS]
    llvm = llvmlite.__version__, llvmlite.binding.llvm_version_info
    versions = numba.__version__, numpy.__version__, llvm, sys.version_info[:2]
    return repr((versions, sys.implementation.cache_tag, settings))


class KernelCache:
    """A kernel's entries, one a signature, for Numba's dispatcher."""

    def __init__(self, dispatcher: Any) -> None:
        """Takes the place of the dispatcher's own cache, which is not used before."""
        self._name: str = dispatcher.__name__
        self._overloads: dict[Any, Any] = dispatcher.overloads
        self._codegen: Callable[[], Any] = dispatcher.targetctx.codegen
        self._compile: Callable[[Any], Any] = dispatcher.compile
        # What was read ahead of `load_overload`, by names of entries.
        self._read: dict[str, bytes] = {}
        # Names of entries that are whole, but from which no kernel can be made.
        self._unusable: set[str] = set()

    @property
    def cache_path(self) -> str:
        """The folder in which kernels are saved, else the first one from which they are loaded."""
        loading, saving = _folders()
        shown = saving or next(iter(loading), None)
        return str(shown.path) if shown else ""

    def compile(self, sig: Any) -> Any:
        """Stands for the dispatcher's `compile`: takes the kernel's turn first, if it is not on disk."""
        if tuple(sig) in self._overloads:
            return self._compile(sig)
        name, key = self._entry(sig)
        if (found := self._content(name, key)) is not None:
            self._read[name] = found
            try:
                return self._compile(sig)
            except _UnusableEntryError as error:
                self._unusable.add(name)
                self._warn(error.reason, self.cache_path)
        loading, saving = _folders()
        compiling.begin(self.cache_path)
        try:
            if saving is None:
                warn_once(
                    logger,
                    "kernels are compiled anew in each process (set NUMBA_CACHE_DIR to a folder that you can write): no folder "
                    "of %s can be written",
                    ", ".join(str(folder.path) for folder in loading) or "a user without a home",
                )
                return self._compile(sig)
            # A thread that is compiling holds the compiler's lock, for which the one that has the turn may wait.
            with saving.turn(name, patience=_LONGEST_WAIT, give_way=global_compiler_lock.is_locked):
                return self._compile(sig)
        finally:
            compiling.end()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code for a signature; None if this process has to compile it."""
        name, key = self._entry(sig)
        content = self._read.pop(name, None) or self._content(name, key, known=True)
        if content is None:
            return None
        # Numba's own cache does so first: what an entry calls must be known to the context.
        target_context.refresh()
        try:
            return CompileResult._rebuild(target_context, *pickle.loads(content))
        except Exception as error:  # unpickling and linking raise anything
            raise _UnusableEntryError(error) from error

    def save_overload(self, sig: Any, data: Any) -> None:
        """Saves what has been compiled; a warning is logged if that fails."""
        _, saving = _folders()
        if saving is None or data.library.has_dynamic_globals:
            return
        name, key = self._entry(sig)
        try:
            saving.write(name, key + dumps(data._reduce()))
        except OSError as error:
            # One line for the folder: a full disk refuses all kernels.
            warn_once(
                logger,
                "compiled kernels could not be saved in %s, so that they are compiled anew at each start (free some space there, "
                "or set NUMBA_CACHE_DIR to another folder): %s",
                saving.path,
                error.strerror or error,
            )

    def _entry(self, sig: Any) -> tuple[str, bytes]:
        """The name of the entry for a signature, and what it begins with."""
        described = repr((self._name, tuple(sig), self._codegen().magic_tuple(), _compiler())).encode()
        key = hashlib.sha256(described).digest()
        return f"{self._name}-{key.hex()[:24]}", key

    def _content(self, name: str, key: bytes, *, known: bool = False) -> bytes | None:
        """The pickled code of an entry, from the first folder that has it; no warning of what is `known` by `compile`."""
        if name in self._unusable:
            return None
        for folder in _folders()[0]:
            try:
                content = folder.read(name)
            except (DamagedEntryError, OSError) as error:
                if not known:
                    self._warn(error, folder.path)
                continue
            if content is not None and content.startswith(key):
                return content[len(key) :]
        return None

    def _warn(self, error: Exception, folder: object) -> None:
        logger.warning(
            "the compiled kernel %s in %s cannot be used and is compiled anew: %s: %s",
            self._name,
            folder,
            type(error).__name__,
            error,
        )


class _UnusableEntryError(Exception):
    """What an entry holds cannot be turned into a kernel.

    Attributes:
        reason: what was raised.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(reason)
        self.reason = reason


def keep_on_disk(dispatcher: Any) -> None:
    """Gives a function of `numba.njit` this cache. The function's name must hold the digest of all that it is made of."""
    cache = KernelCache(dispatcher)
    dispatcher._cache = cache
    # Numba calls it for each signature that is new, from Python and while it compiles callers.
    dispatcher.compile = cache.compile


def _folders() -> tuple[tuple[KernelFolder, ...], KernelFolder | None]:
    found = folders(config.CACHE_DIR)
    for folder in found[0]:
        if folder.path not in _looked_at:
            _looked_at.add(folder.path)
            if refusal := folder.refusal():
                logger.warning("no compiled kernels are loaded from %s: %s", folder.path, refusal)
    return found


_looked_at: set[Path] = set()


# A forked process has the compiler's lock as it was, and nobody in it would give it back. So what another thread compiles is
# done before the process is made.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)
