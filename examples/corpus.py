"""Text for the examples, as numbers of characters: found on this machine, and never downloaded.

A dictionary of English (Debian's package `dict-gcide`) is taken where it is installed. Otherwise it is the source of Python's
standard library, which every machine with Python has. `load` also accepts a path to any text file, gzipped or not.
"""

from __future__ import annotations

import gzip
import hashlib
import platform
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

GCIDE = Path("/usr/share/dictd/gcide.dict.dz")  # its format is one that gzip reads

SYMBOLS = 128  # ASCII; any other byte becomes a question mark
LIMIT = 4 << 20  # bytes of a text that are used
BLOCK, EVERY = 4096, 20  # of so many blocks of so many characters, the last is for validation
_ASCII = bytes(range(SYMBOLS)) + b"?" * (256 - SYMBOLS)


class CorpusError(RuntimeError):
    """A text is not there or is not what it should be; the message contains the remedy."""


@dataclass(frozen=True)
class Corpus:
    """A text in two parts, which come evenly from all of it.

    Attributes:
        name: of the text.
        training: numbers of characters from 0 to `SYMBOLS` - 1, int64.
        validation: the same, of the blocks that are held back: one twentieth.
        digest: start of the text's SHA-256.
    """

    name: str
    training: torch.Tensor
    validation: torch.Tensor
    digest: str


def load(path: Path | None = None) -> Corpus:
    """Reads a text: a file, or what this machine has.

    Raises:
        CorpusError: the file cannot be read, or is too short.
    """
    if path is not None:
        name, text = path.name, _read(path)
    elif GCIDE.exists():
        name, text = "gcide", _read(GCIDE)
    else:
        return library()
    return _divided(name, text)


def library() -> Corpus:
    """Returns the source of Python's standard library, as far as it is used."""
    return _divided(f"source of Python {platform.python_version()}", _standard_library())


def manual() -> Corpus:
    """Returns the reference manual of Python, which `pydoc` prints: half a million characters, mostly of English."""
    # Not before: it takes long to read, and few need it.
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return _divided(f"reference manual of Python {platform.python_version()}", text)


def _divided(name: str, text: bytes) -> Corpus:
    text = text[:LIMIT].translate(_ASCII)
    blocks = len(text) // (BLOCK * EVERY) * EVERY
    if not blocks:
        raise CorpusError(f"{name} has {len(text)} characters, expected {BLOCK * EVERY} or more: give a longer text")
    stream = torch.frombuffer(bytearray(text[: blocks * BLOCK]), dtype=torch.uint8).long().view(-1, EVERY, BLOCK)
    digest = hashlib.sha256(text).hexdigest()[:16]
    return Corpus(name, stream[:, :-1].flatten(), stream[:, -1].flatten(), digest)


def windows(stream: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Divides a text into windows; returns each window, and the characters that follow its characters.

    Args:
        stream: numbers of characters.
        length: of a window.

    Returns:
        Two views of `stream`, shape (windows, length).
    """
    count = (len(stream) - 1) // length
    x, y = (stream[first : first + count * length].view(count, length) for first in (0, 1))
    return x, y


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"{path} cannot be read: {error}; give another text with --data PATH") from error


def _standard_library() -> bytes:
    """The modules of Python's standard library in alphabetical order, as far as they are used."""
    parts, size = [], 0
    for file in _modules(Path(sysconfig.get_path("stdlib"))):
        parts.append(_read(file))
        size += len(parts[-1])
        if size >= LIMIT:
            break
    return b"".join(parts)


def _modules(folder: Path) -> Iterator[Path]:
    # By name: the folder may also hold all packages that are installed.
    for name in sorted(sys.stdlib_module_names):
        yield from [file for file in (folder / f"{name}.py",) if file.exists()]
        yield from sorted((folder / name).rglob("*.py"))
