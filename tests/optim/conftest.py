"""What several files of tests need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.tensor import init_device_mesh

from bagua_kernels.optim.watch import sweep


@pytest.fixture(scope="module")
def one_process() -> Iterator[dist.DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), world_size=1, rank=0)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def few_tensors_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tests need not have as many as a watch pays for on a CPU."""
    monkeypatch.setattr(sweep, "FEWEST_ON_CPU", sweep.FEWEST)
