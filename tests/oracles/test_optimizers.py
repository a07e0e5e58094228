"""Tests of the optimizer oracles against `torch.optim` in float64."""

import numpy as np
import numpy.typing as npt
import pytest

from tests.grids import grid
from tests.oracles import optimizers

F64 = npt.NDArray[np.float64]


@grid(
    cover=1,
    momentum__dampening__weight_decay__nesterov__maximize=[
        (0.0, 0.0, 0.0, False, False),
        (0.0, 0.0, 0.1, False, True),
        (0.9, 0.0, 0.0, False, False),
        (0.9, 0.3, 0.01, False, False),
        (0.9, 0.3, 0.01, False, True),
        (0.8, 0.0, 0.01, True, False),
        (0.8, 0.0, 0.1, True, True),
        (0.5, 1.0, 0.0, False, False),
    ],
)
def test_sgd_agrees_with_torch(
    momentum: float, dampening: float, weight_decay: float, nesterov: bool, maximize: bool
) -> None:
    """Six steps in float64."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    p = rng.standard_normal(50)
    theirs = torch.tensor(p, requires_grad=True)
    optimizer = torch.optim.SGD(
        [theirs],
        lr=0.05,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
    )
    buf: F64 | None = None
    for _ in range(6):
        g = rng.standard_normal(50)
        p, buf = optimizers.sgd(p, g, buf, 0.05, momentum, dampening, weight_decay, nesterov, maximize)
        theirs.grad = torch.tensor(g)
        optimizer.step()
        np.testing.assert_allclose(p, theirs.detach().numpy(), rtol=1e-13, atol=1e-15)
        if momentum:
            assert buf is not None
            expected = optimizer.state[theirs]["momentum_buffer"].numpy()
            np.testing.assert_allclose(buf, expected, rtol=1e-13, atol=1e-15)
        else:
            assert buf is None


@grid(
    maximize=[False, True],
    weight_decay=[0.0, 0.01, 0.5],
    beta1__beta2__eps=[(0.9, 0.999, 1e-8), (0.5, 0.9, 1e-3), (0.0, 0.0, 1e-8)],
)
def test_adamw_agrees_with_torch(weight_decay: float, maximize: bool, beta1: float, beta2: float, eps: float) -> None:
    """Six steps in float64."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    p = rng.standard_normal(50)
    m, v = np.zeros(50), np.zeros(50)
    theirs = torch.tensor(p, requires_grad=True)
    optimizer = torch.optim.AdamW(
        [theirs], lr=0.02, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, maximize=maximize
    )
    for step in range(1, 7):
        g = rng.standard_normal(50)
        p, m, v = optimizers.adamw(p, g, m, v, step, 0.02, beta1, beta2, eps, weight_decay, maximize)
        theirs.grad = torch.tensor(g)
        optimizer.step()
        np.testing.assert_allclose(p, theirs.detach().numpy(), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(m, optimizer.state[theirs]["exp_avg"].numpy(), rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(v, optimizer.state[theirs]["exp_avg_sq"].numpy(), rtol=1e-12, atol=1e-15)
