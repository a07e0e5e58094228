"""Every backend applies an elementwise rule as its float64 oracle does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bagua_kernels.launchers import elementwise
from bagua_kernels.rules.optimizers import ADAM, SGD, ElementwiseRule
from tests.cases import LENGTHS, SHORT_LENGTHS
from tests.conftest import EMULATED, Target
from tests.grids import grid
from tests.oracles import optimizers as oracle

lengths = SHORT_LENGTHS if EMULATED else LENGTHS
LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.999, 1e-8, 0.1
# Relative to the largest parameter: a few roundings of the arithmetic's dtype, and one of the storage's a step.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def adamw_scalars(step: int) -> tuple[float, ...]:
    bias1, bias2 = 1 - BETA1**step, 1 - BETA2**step
    return (0.0, 1 - LR * DECAY, 1 - BETA1, BETA2, 1 - BETA2, EPS, LR / bias1, bias2**0.5)


@grid(n=lengths, dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16], cover=1)
def test_adamw(target: Target, n: int, dtype: torch.dtype) -> None:
    if dtype == torch.float64 and target.backend == "triton":
        with pytest.raises(TypeError, match="numba_cuda"):
            elementwise.apply(ADAM, [torch.ones(3, dtype=dtype, device=target.device)] * 4, adamw_scalars(1))
        return
    generator = torch.Generator().manual_seed(n)
    p = torch.randn(n, generator=generator).to(dtype)
    state = [p.clone().to(target.device)] + [torch.zeros(n, dtype=torch.float32 if dtype != torch.float64 else dtype,
                                                 device=target.device) for _ in range(2)]  # fmt: skip
    expected = p.double().numpy(), np.zeros(n), np.zeros(n)
    for step in (1, 2, 3):
        g = torch.randn(n, generator=generator).to(dtype)
        elementwise.apply(ADAM, (state[0], g.to(target.device), state[1], state[2]), adamw_scalars(step))
        expected = oracle.adamw(expected[0], g.double().numpy(), *expected[1:], step, LR, BETA1, BETA2, EPS, DECAY)
    tolerance = TOLERANCE[dtype] * max(1.0, float(p.abs().max()) if n else 1.0)
    assert np.allclose(state[0].cpu().double().numpy(), expected[0], rtol=0, atol=tolerance)
    exact = TOLERANCE[torch.float64 if dtype == torch.float64 else torch.float32]
    assert np.allclose(state[2].cpu().double().numpy(), expected[2], rtol=4 * exact, atol=1e-30)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd(target: Target, nesterov: bool) -> None:
    n, momentum, dampening = 300, 0.9, 0.0 if nesterov else 0.25
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(n, generator=generator)
    param, buffer = p.to(target.device), torch.zeros(n, device=target.device)
    expected, expected_buffer = p.double().numpy(), None
    for step in range(3):
        g = torch.randn(n, generator=generator)
        undamped = 1.0 if step == 0 else 1.0 - dampening
        scalars = (LR, momentum, undamped, DECAY, float(nesterov))
        elementwise.apply(SGD, (param, g.to(target.device), buffer), scalars)
        expected, expected_buffer = oracle.sgd(
            expected, g.double().numpy(), expected_buffer, LR, momentum, dampening, DECAY, nesterov, False
        )
    assert np.allclose(param.cpu().double().numpy(), expected, rtol=0, atol=1e-6)


def test_backends_agree_bit_for_bit(target: Target) -> None:
    """The rule as plain Python on NumPy arrays is the reference for its own rounding."""
    rng = np.random.default_rng(3)
    p, g, m = (rng.standard_normal(257).astype(np.float32) for _ in range(3))
    v = rng.random(257).astype(np.float32)
    scalars = tuple(np.float32(s) for s in adamw_scalars(4))
    expected = ADAM.function(p, g, m, v, *scalars)
    arrays = [torch.from_numpy(a.copy()).to(target.device) for a in (p, g, m, v)]
    elementwise.apply(ADAM, arrays, scalars)
    for position, reference in zip(ADAM.writes, expected, strict=True):
        assert np.array_equal(arrays[position].cpu().numpy(), reference)
    assert np.array_equal(arrays[1].cpu().numpy(), g)


def axpy(x, y, a):
    return x * a + y


AXPY = ElementwiseRule("axpy", axpy, arrays=2, writes=(1,))


def test_rule_of_ones_own(target: Target) -> None:
    x = torch.arange(100, dtype=torch.float32, device=target.device)
    y = torch.ones(100, device=target.device)
    elementwise.apply(AXPY, (x, y), (2.0,))
    assert torch.equal(y, x * 2 + 1)


def captured():
    k = 2.0

    def rule(x):
        return x * k

    return rule


FACTOR = 3.0


def reads_a_global(x):
    return x * FACTOR


@pytest.mark.parametrize(
    ("function", "message"),
    [(captured(), "captures k"), (reads_a_global, "reads the global 'FACTOR'"), (abs, "plain Python")],
)
def test_functions_that_cannot_be_rules(function, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ElementwiseRule("bad", function, arrays=1, writes=(0,))


class TestArguments:
    def test_number_of_arrays(self) -> None:
        with pytest.raises(ValueError, match="takes 4 arrays, got 1"):
            elementwise.apply(ADAM, [torch.ones(3)], adamw_scalars(1))

    def test_lengths(self) -> None:
        with pytest.raises(ValueError, match=r"1-D with 3 elements as array 0, got shape \(4,\)"):
            elementwise.apply(AXPY, [torch.ones(3), torch.ones(4)], (1.0,))

    def test_dtype(self) -> None:
        with pytest.raises(TypeError, match=r"array 1 of rule 'axpy'.*got torch\.int32"):
            elementwise.apply(AXPY, [torch.ones(3), torch.ones(3, dtype=torch.int32)], (1.0,))

    def test_mixed_with_float64(self) -> None:
        with pytest.raises(TypeError, match="cannot be mixed"):
            elementwise.apply(AXPY, [torch.ones(3), torch.ones(3, dtype=torch.float64)], (1.0,))

    def test_stride_and_device(self) -> None:
        with pytest.raises(ValueError, match="contiguous"):
            elementwise.apply(AXPY, [torch.ones(6)[::2], torch.ones(3)], (1.0,))
        with pytest.raises(ValueError, match="must be on cpu as array 0, got meta"):
            elementwise.apply(AXPY, [torch.ones(3), torch.ones(3, device="meta")], (1.0,))
