"""Gradients and parameters that ranks hold in different ways are not taken for what lies in a rank's memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from bagua_kernels import optim


def test_partial_sums_are_left_to_torch(one_process: dist.DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    p = nn.Parameter(distribute_tensor(torch.ones(6), one_process, [Replicate()]))
    p.grad = DTensor.from_local(torch.ones(6), one_process, [Partial()])
    optimizer = optim.SGD([p], lr=0.1)
    optimizer.step()
    assert "placed as (Partial(sum)" in caplog.text
    torch.testing.assert_close(p.detach().full_tensor(), torch.full((6,), 0.9))
    # Noticed in later steps, too.
    p.grad = distribute_tensor(torch.ones(6), one_process, [Replicate()])
    optimizer.step()
    caplog.clear()
    optimizer._reported = None
    p.grad = DTensor.from_local(torch.ones(6), one_process, [Partial()])
    optimizer.step()
    assert "placed as" in caplog.text
    torch.testing.assert_close(p.detach().full_tensor(), torch.full((6,), 0.7))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim has no Muon before 2.9")
def test_a_part_of_a_matrix_is_left_to_torch(one_process: dist.DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    p = nn.Parameter(distribute_tensor(torch.eye(4), one_process, [Shard(0)]))
    p.grad = distribute_tensor(torch.eye(4), one_process, [Shard(0)])
    optim.Muon([p], ns_steps=1).step()
    assert "whole matrices" in caplog.text
