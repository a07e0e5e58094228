"""What every test of ranks has to leave as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests import limits


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """The threads that a test has started are gone after it, without help of the garbage collector."""
    before = set(threading.enumerate())
    yield

    def left() -> list[str]:
        return [t.name for t in set(threading.enumerate()) - before if t.name.startswith("bagua_kernels")]

    limits.until(lambda: not left(), lambda: f"{left()} end", limit=5)
