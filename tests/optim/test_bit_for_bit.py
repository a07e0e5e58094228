"""Where roots are rounded correctly, which PyTorch's on the CPU are not always, ours are PyTorch's steps bit for bit."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels import optim
from tests.grids import grid
from tests.optim.cases import TORCH_CASES, Case

SHAPES = [(3000,), (41, 17), (4, 3, 3, 3), (1,), ()]


def root(x: torch.Tensor) -> torch.Tensor:
    """A float64 root of a float32, rounded to float32, is the correctly rounded root."""
    return torch.pow(x.double(), 0.5).to(x.dtype)


def scalars_in_float64(case: Case) -> bool:
    """PyTorch takes bias corrections in float32 where `lr` or `betas` are tensors."""
    options = case.options()
    return not any(isinstance(v, torch.Tensor) for o in options.values() for v in (o if isinstance(o, tuple) else (o,)))


@grid(
    case=[case for case in TORCH_CASES if scalars_in_float64(case)],
    steps=[10, pytest.param(100, marks=pytest.mark.beyond)],
)
def test_many_steps(case: Case, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    mine, other = ([torch.nn.Parameter(v.clone()) for v in values] for _ in range(2))
    ours = getattr(optim, case.optimizer)(mine, **case.options())
    theirs = getattr(torch.optim, case.optimizer)(other, **case.options(), foreach=False)
    monkeypatch.setattr(torch.Tensor, "sqrt", root)
    monkeypatch.setattr(torch.Tensor, "sqrt_", lambda x: x.copy_(root(x)))
    for _ in range(steps):
        for p, q in zip(mine, other, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(mine, other, strict=True):
        assert torch.equal(p, q)
        for key, value in theirs.state[q].items():
            assert torch.equal(ours.state[p][key], value), key
