"""The deprecated `start_from`: steps equal those after a copy of the values, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.compression import AbsMaxInt8
from bagua_kernels.optim import SGD, Extras
from tests.grids import grid
from tests.optim.step.training import copied, make, parameters, params_of

WARNING = "start_from goes with the next release"

deprecated = pytest.mark.filterwarnings(f"ignore:{WARNING}:DeprecationWarning")


def test_it_warns_where_it_is_called() -> None:
    p = nn.Parameter(torch.ones(5))
    with pytest.warns(DeprecationWarning, match=WARNING) as caught:
        SGD([p], lr=0.1).start_from({p: torch.zeros(5)})
    assert [each.filename for each in caught] == [__file__]


@deprecated
@grid(
    kind=["adamw", "sgd_momentum"],
    dtype__extras=[(torch.float32, Extras()), (torch.bfloat16, Extras(precision="master", average=0.5))],
    cover=1,
)
def test_as_after_a_copy(kind: str, dtype: torch.dtype, extras: Extras) -> None:
    """Also in the first step, which makes states from the parameters; the last step starts from the parameters again."""
    mine = [nn.Parameter(p.detach().to(dtype)) for p in parameters()]
    one: Any = make(kind, mine, extras)
    other = make(kind, copied(mine), extras)
    for step in range(4):
        drawn = torch.Generator().manual_seed(step)
        starts = [(p.detach() + torch.randn(p.shape, generator=drawn)).to(dtype) for p in params_of(one)]
        for p, q in zip(params_of(one), params_of(other), strict=True):
            p.grad = torch.randn(p.shape, generator=drawn).to(dtype)
            q.grad = p.grad.clone()
        if step < 3:
            one.start_from(dict(zip(params_of(one), starts, strict=True)))
            with torch.no_grad():
                for q, start in zip(params_of(other), starts, strict=True):
                    q.copy_(start)
        one.step()
        other.step()
        for p, q in zip(params_of(one), params_of(other), strict=True):
            assert torch.equal(p, q)
            for name, value in one.state[p].items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.state[q][name]))


@deprecated
def test_skipped_steps_start_there_too() -> None:
    """A step without gradients, and one whose gradients a scaler found to be infinite, leave the values that were to be used."""
    p = nn.Parameter(torch.ones(5))
    optimizer = SGD([p], lr=0.1)
    optimizer.start_from({p: torch.full((5,), 2.0)})
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((5,), 2.0))
    p.grad = torch.full((5,), float("inf"))
    optimizer.found_inf, optimizer.grad_scale = torch.ones(1), torch.ones(1)  # type: ignore[attr-defined]
    optimizer.start_from({p: torch.full((5,), 3.0)})
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((5,), 3.0))


@deprecated
def test_other_ways_to_step() -> None:
    """PyTorch's own way, and steps from payloads, start there too."""
    p = nn.Parameter(torch.ones(64))
    optimizer = SGD([p], lr=0.5)
    p.grad = torch.ones(64).to_sparse()
    optimizer.start_from({p: torch.full((64,), 2.0)})
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((64,), 1.5))
    p.grad = None
    codec = AbsMaxInt8()
    plain = SGD([p], lr=0.5)
    plain.start_from({p: torch.full((64,), 4.0)})
    plain.step_from_encoded(codec, {p: codec.encode(torch.ones(64))[None]})
    assert torch.equal(p.detach(), torch.full((64,), 3.5))


@deprecated
def test_wrong_starts() -> None:
    p = nn.Parameter(torch.ones(5))
    optimizer = SGD([p], lr=0.1)
    with pytest.raises(ValueError, match="in no group"):
        optimizer.start_from({nn.Parameter(torch.ones(5)): torch.ones(5)})
    for wrong in (torch.ones(4), torch.ones(5, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"a start must be torch.float32 of shape \(5,\) on cpu"):
            optimizer.start_from({p: wrong})
