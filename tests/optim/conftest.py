"""What several files of tests need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.tensor import init_device_mesh


@pytest.fixture(scope="module")
def one_process() -> Iterator[dist.DeviceMesh]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), world_size=1, rank=0)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
