"""Every backend adds up the values of ranks with the bits that NumPy has, product by product and sum by sum."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from bagua_kernels.launchers import elementwise
from bagua_kernels.rules import mixing
from tests.conftest import Target
from tests.grids import grid, only

N = 1037
THIRDS = (2 / 3, 1 / 6, 1 / 6, 0.3, 0.05)


def values(terms: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(terms)
    return [torch.randn(N, generator=generator).to(dtype) for _ in range(terms)]


def summed(arrays: list[torch.Tensor], weights: list[float] | None) -> npt.NDArray[np.float32]:
    """The sum in float32, as `comm.topology.weighted_sum` documents it; the mean if there are no weights."""
    total = np.zeros(N, np.float32)
    for place, array in enumerate(arrays):
        term = array.float().numpy() * np.float32(1 if weights is None else weights[place])
        total = term if not place else total + term
    return total if weights is not None else total / np.float32(len(arrays))


def scalars(terms: int, weights: list[float] | None) -> list[float]:
    return [*(weights or [1.0] * terms), 1.0 if weights else float(terms)]


@grid(terms=[2, 3, 4, 5], own=[0, 1, 2, 4], mean=[True, False], dtype=[torch.float32, torch.bfloat16, torch.float16],
      where=lambda terms, own, **_: own < terms, cover=1)  # fmt: skip
def test_own_value_becomes_the_sum(target: Target, terms: int, own: int, mean: bool, dtype: torch.dtype) -> None:
    arrays, weights = values(terms, dtype), None if mean else list(THIRDS[:terms])
    expected = torch.from_numpy(summed(arrays, weights)).to(dtype)
    placed = [array.to(target.device) for array in arrays]
    elementwise.apply(mixing.mixed(terms, own), placed, scalars(terms, weights))
    for place, array in enumerate(placed):
        assert torch.equal(array.cpu(), expected if place == own else arrays[place])


@grid(neighbours=only([1, 2, 3, 4], 1, 3), divisor=[1.0, 6.0], cover=1)
def test_flows_change_corrections_and_parameters(target: Target, neighbours: int, divisor: float) -> None:
    *others, own, correction, x = values(neighbours + 3, torch.float32)
    x, weights, flow = x.bfloat16(), [1.0, 4.0, 2.0, 0.3][:neighbours], np.zeros(N, np.float32)
    for other, weight in zip(others, weights, strict=True):
        flow = flow + (other.numpy() - own.numpy()) * np.float32(weight)
    new = correction.numpy() - flow / np.float32(divisor)
    placed = [each.to(target.device, copy=True) for each in [*others, own, correction, x]]
    elementwise.apply(mixing.flows(neighbours), placed, [*weights, divisor])
    assert np.array_equal(placed[-2].cpu().numpy(), new)
    assert torch.equal(placed[-1].cpu(), torch.from_numpy(x.float().numpy() - new).bfloat16())
    for before, after in zip([*others, own], placed, strict=False):
        assert torch.equal(before, after.cpu())


@pytest.mark.parametrize("terms", [1, 6])
def test_other_numbers_of_ranks_have_no_rule(terms: int) -> None:
    with pytest.raises(KeyError):
        mixing.mixed(terms, 0)
