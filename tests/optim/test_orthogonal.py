"""Muon's iteration where the processor has no products in bfloat16: against NumPy in float64, and beside PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.optim import orthogonal
from tests.grids import grid

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim has no Muon before 2.9")

COEFFICIENTS, STEPS, EPS = (3.4445, -4.775, 2.0315), 5, 1e-7


@pytest.fixture(autouse=True)
def without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orthogonal, "multiplies_bfloat16", lambda: False)


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def oracle(x: np.ndarray) -> np.ndarray:
    """The singular values go through the polynomial, and their vectors stay."""
    left, values, right = np.linalg.svd(x / np.linalg.norm(x), full_matrices=False)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        values = a * values + b * values**3 + c * values**5
    return (left * values) @ right


def error(found: torch.Tensor, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found.double().numpy() - wanted) / np.linalg.norm(wanted))


@grid(shape=[(1, 1), (1, 7), (5, 8), (40, 16), (33, 33), (64, 192), (300, 20)], scale=[1e-6, 1.0, 1e6])
def test_it_is_as_near_to_float64_as_pytorchs(shape: tuple[int, int], scale: float) -> None:
    x = scale * matrix(*shape)
    before = x.clone()
    found = orthogonal.orthogonal(x, COEFFICIENTS, STEPS, EPS)
    assert found.dtype == torch.bfloat16
    assert found.shape == x.shape
    assert torch.equal(x, before)
    own = error(found, oracle(x.double().numpy()))
    theirs = error(
        torch.optim._muon._zeropower_via_newtonschulz(x, COEFFICIENTS, STEPS, EPS), oracle(x.double().numpy())
    )
    assert own < 0.05
    assert own < 1.5 * theirs + 0.005


@grid(shape=[(8, 20), (20, 8), (64, 64)], native=[False, True])
def test_many_matrices_are_each_for_itself(
    shape: tuple[int, int], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orthogonal, "multiplies_bfloat16", lambda: native)
    x = torch.stack([matrix(*shape), 2 * matrix(*shape).flip(1)])
    found = orthogonal.orthogonal(x, COEFFICIENTS, STEPS, EPS)
    assert found.dtype == torch.bfloat16
    assert found.shape == x.shape
    for own, one in zip(found, x, strict=True):
        assert error(own, oracle(one.double().numpy())) < 0.05


def test_zeros_stay_zeros() -> None:
    assert not orthogonal.orthogonal(torch.zeros(4, 6), COEFFICIENTS, STEPS, EPS).any()


@pytest.mark.parametrize(
    ("shape", "coefficients", "steps"), [((4,), COEFFICIENTS, 5), ((4, 4), (1.0, 2.0), 5), ((4, 4), COEFFICIENTS, 100)]
)
def test_what_pytorch_refuses_is_refused(shape: tuple[int, ...], coefficients: tuple[float, ...], steps: int) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        orthogonal.orthogonal(matrix(*shape), coefficients, steps, EPS)  # type: ignore[arg-type]


@grid(dtype=[torch.float32, torch.float64], nesterov=[True, False])
def test_training_goes_where_pytorchs_does(dtype: torch.dtype, nesterov: bool) -> None:
    trained, start = [], [matrix(12, 30).to(dtype), matrix(30, 9).to(dtype)]
    for library in (optim, torch.optim):
        params = [nn.Parameter(p.clone()) for p in start]
        optimizer = library.Muon(params, lr=0.02, nesterov=nesterov)
        for _ in range(5):
            for p in params:
                p.grad = torch.sin(3 * p.detach()) + 0.1
            optimizer.step()
        trained.append([p.detach().double() for p in params])
    for first, own, theirs in zip(start, *trained, strict=True):
        moved = (theirs - first.double()).norm()
        assert (own - theirs).norm() < 0.03 * moved
