"""What every test of ranks has to leave as it was."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """The threads that a test has started are gone after it, without help of the garbage collector."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    while left := [t.name for t in set(threading.enumerate()) - before if t.name.startswith("bagua_kernels")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
