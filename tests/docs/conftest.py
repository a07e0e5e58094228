"""What tests of pages share: programs whose ranks are threads."""

from __future__ import annotations

import threading

import pytest

from bagua_kernels import comm


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Makes `comm.init` and the like those of the thread that calls them, which sets `communicator`."""
    here = threading.local()
    monkeypatch.setattr(comm, "init", lambda **_: here.communicator)
    monkeypatch.setattr(comm, "world", lambda: here.communicator)
    monkeypatch.setattr(comm, "device", lambda: here.communicator.device)
    monkeypatch.setattr(comm, "rank", lambda: here.communicator.rank)
    return here
