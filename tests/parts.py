"""Parts of a run: its items, dealt by the hashes of their names, so that each machine deals them alike."""

from __future__ import annotations

import hashlib

import pytest


def parse(text: str) -> tuple[int, int]:
    """Returns the number of a part and the number of parts; `0/3` is the first of three.

    Raises:
        pytest.UsageError: if the text means nothing else.
    """
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise pytest.UsageError(f"got --part {text!r}, expected K/N with K from 0 to N - 1: for example --part 0/3")
    return int(number), int(count)


def contains(part: tuple[int, int], nodeid: str) -> bool:
    """Returns True if an item belongs to a part."""
    number, count = part
    return int.from_bytes(hashlib.sha256(nodeid.encode()).digest()[:8], "big") % count == number
