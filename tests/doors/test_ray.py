"""Ray Train's workers, without a cluster: whose GPU a rank has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from bagua_kernels.comm.backends.torch_distributed.group import Service
from tests.doors.jobs import needs


@needs("ray")
@pytest.mark.parametrize(
    ("visible", "own", "index"),
    [("0,1", "1", 1), ("2,3", "2", 0), ("5", "5", 0)],
    ids=["the second of two", "the first of two", "the only one"],
)
def test_a_worker_has_the_gpu_that_ray_gave_it(
    visible: str, own: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of a host may see the same GPUs, and a GPU's place among them need not be LOCAL_RANK (T33).

    Ray makes its choice the current device, before the training loop. The default group's device is that one in `comm.init()`,
    whatever LOCAL_RANK is.
    """
    import ray
    from ray.air._internal.device_manager.nvidia_gpu import CUDATorchDeviceManager

    current: list[torch.device] = []
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [own])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible.split(",")))
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1].index)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("LOCAL_RANK", str(1 - index))  # another one than the place of the GPU
    manager = CUDATorchDeviceManager()
    (device,) = manager.get_devices()
    manager.set_device(device)
    group: Any = object()
    assert Service.of(group, None).device == torch.device("cuda", index)
