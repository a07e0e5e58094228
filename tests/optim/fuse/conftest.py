"""Threads of the tests of fused optimizers."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def one_thread(one_thread: None) -> None:
    """For all tests here; the test of large tensors asks for two threads."""
