"""What the tests of NCCL on a stand-in need."""

from __future__ import annotations

import pytest

from bagua_kernels.comm.backends.nccl import watchdog as nccl_watchdog


@pytest.fixture
def short_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog looks often."""
    monkeypatch.setattr(nccl_watchdog, "_PERIOD", 0.005)
    monkeypatch.setattr(nccl_watchdog, "_PATIENT", 0.1)
