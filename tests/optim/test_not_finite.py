"""Gradients that are infinite or NaN in one step: an element is finite again where PyTorch's is, and has its value."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bagua_kernels import optim
from tests.grids import grid
from tests.optim.cases import TORCH_CASES, Case

FIRST = torch.linspace(-1.0, 1.0, 37)


def history(library: object, case: Case, bad: float, at: int, restored: bool) -> list[dict[str, Tensor]]:
    """Parameter and states after each step; every third element of one gradient is bad.

    With `restored` the parameter is then made finite, as by a user who goes back to older values.
    """
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(FIRST.clone())
    optimizer = getattr(library, case.optimizer)([p], **case.options(), foreach=False)
    found = []
    for step in range(6):
        p.grad = torch.randn(p.shape, generator=generator)
        # An infinity meets zeros before and after it.
        p.grad[1::2] *= step % 2
        if step == at:
            p.grad[::3] = bad
        optimizer.step()
        if restored:
            with torch.no_grad():
                p.copy_(torch.where(p.isfinite(), p, FIRST))
        tensors = {key: value for key, value in optimizer.state[p].items() if isinstance(value, Tensor)}
        found.append({key: value.detach().clone() for key, value in {**tensors, "parameter": p}.items()})
    return found


@grid(case=TORCH_CASES, bad=[math.nan, math.inf, -math.inf], at=[0, 2], restored=[False, True], cover=1)
def test_elements_recover_where_torchs_do(case: Case, bad: float, at: int, restored: bool) -> None:
    mine, other = (history(library, case, bad, at, restored) for library in (optim, torch.optim))
    for ours, theirs in zip(mine, other, strict=True):
        for key, value in theirs.items():
            finite = value.isfinite()
            torch.testing.assert_close(ours[key][finite], value[finite], rtol=1e-4, atol=1e-5)


def test_rprop_leaves_an_element_out_of_the_step() -> None:
    p = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = optim.Rprop([p], lr=0.5)
    for gradient in ([1.0, 1.0], [math.nan, 1.0]):
        before = p[0].item()
        p.grad = torch.tensor(gradient)
        optimizer.step()
    assert p[0].item() == before
    assert optimizer.state[p]["step_size"].tolist() == [0.5, torch.tensor(0.6).item()]
