"""Muon with a learning rate that is a tensor, against PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.optim import orthogonal
from tests.grids import grid

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim has no Muon before 2.9")


@pytest.mark.slow
@grid(dtype=[torch.float32, torch.float64], rate=[torch.float32, torch.float64], shape=[(), (1,)])
def test_rate_is_rounded_as_by_torch(
    dtype: torch.dtype, rate: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bits: products of a float32 tensor are rounded to float32, whatever the parameters have."""
    # With PyTorch's iteration on processors without bfloat16, too, whose sums have its order.
    monkeypatch.setattr(orthogonal, "multiplies_bfloat16", lambda: True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        start = [torch.randn(s, generator=generator, dtype=dtype) for s in ((8, 5), (5, 5))]
        lr = torch.rand(shape, generator=generator, dtype=torch.float64).to(rate) / 10
        trained = []
        for library in (optim, torch.optim):
            params = [nn.Parameter(p.clone()) for p in start]
            optimizer = library.Muon(params, lr=lr.clone(), weight_decay=0.1)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            for _ in range(3):
                for p in params:
                    p.grad = torch.sin(3 * p.detach()) + 0.1
                optimizer.step()
                schedule.step()
            trained.append(params)
        assert all(map(torch.equal, *trained))
