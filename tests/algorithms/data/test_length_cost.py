"""What samples cost by their length, given and measured."""

import numpy as np
import pytest

from bagua_kernels.algorithms import LengthCost


def test_given() -> None:
    assert LengthCost()([1, 3]).tolist() == [1.0, 3.0]
    assert LengthCost(linear=2, quadratic=0.5, fixed=9)([2, 4]).tolist() == [6.0, 16.0]


@pytest.mark.parametrize(
    ("fixed", "linear", "quadratic"), [(0.1, 0.01, 0.001), (0.0, 0.01, 0.0), (0.2, 0.0, 0.003), (0.0, 0.02, 0.0001)]
)
def test_measured(fixed: float, linear: float, quadratic: float) -> None:
    generator = np.random.default_rng(0)
    batches = [generator.integers(1, 200, size=8).tolist() for _ in range(30)]
    exact = np.array([fixed + sum(linear * n + quadratic * n * n for n in one) for one in batches])
    found = LengthCost.fit(batches, exact.tolist())
    assert (found.fixed, found.linear, found.quadratic) == pytest.approx((fixed, linear, quadratic), rel=1e-6, abs=1e-9)
    noisy = LengthCost.fit(batches, (exact * generator.normal(1, 0.02, len(exact))).tolist())
    for one in ([10] * 8, [150] * 8):
        took = fixed + sum(linear * n + quadratic * n * n for n in one)
        assert noisy.fixed + noisy(one).sum() == pytest.approx(took, rel=0.15)


def test_costs_are_not_negative() -> None:
    """Times that grow slower than lengths would make the quadratic part negative."""
    found = LengthCost.fit([[10], [20], [40], [80]], [1.0, 1.9, 3.5, 6.4])
    assert found.quadratic == 0
    assert found.linear > 0
    assert found.fixed >= 0


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least three different lengths, got 2 steps"):
        LengthCost.fit([[10], [20]], [1.0, 2.0])
    with pytest.raises(ValueError, match="a positive time for each step"):
        LengthCost.fit([[10], [20]], [1.0])
    with pytest.raises(ValueError, match="a positive time for each step"):
        LengthCost.fit([[10], [20], [30]], [1.0, 0.0, 1.0])
    with pytest.raises(ValueError, match="do not grow with the lengths"):
        LengthCost.fit([[10], [20], [40], [80]], [8.0, 4.0, 2.0, 1.0])
