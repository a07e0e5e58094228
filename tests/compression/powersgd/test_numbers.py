"""The numbers that PowerSGD makes of factors: random, orthonormal, summed and rounded as its page says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bagua_kernels.compression import fold_seed
from bagua_kernels.compression.powersgd import PowerSGD
from bagua_kernels.compression.powersgd.orthonormal import (
    gaussian,
    name_number,
    norms,
    orthonormalize,
    orthonormalize_by_operations,
    power_of_two,
    tree_sum,
)
from tests.compression.powersgd.ranks import error, exchange, gradients, matrix, same
from tests.grids import grid, only
from tests.oracles import powersgd as oracle

GOLDEN = [-9290244, 32331984, -23080700, -7003221, -12180968, 5715386]


def test_random_numbers_are_the_seed_s_own() -> None:
    """Equal on all ranks, different for other seeds, steps and names; torch's and NumPy's generators are left alone."""
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    shapes = [(9, 9), (9, 9)]
    ones = [torch.eye(9)] * 2
    for warm in (True, False):
        states = [PowerSGD(min_compression=0, seed=s, warm_start=warm).start(shapes) for s in (1, 1, 2)]
        first, again, other = (state.left(ones).clone() for state in states)
        assert same(first, again)
        assert error(first, other) > 0.1
        assert error(first[:9], first[9:]) > 0.1
        exchange(states, [ones] * 3)
    assert torch.equal(torch_before, torch.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])


def test_random_numbers_are_nearly_normal() -> None:
    z = gaussian(7, (400, 500)).astype(np.float64)
    n = z.size
    assert z.shape == (400, 500)
    assert abs(z.mean()) < 4 / n**0.5
    assert abs(z.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs((z**3).mean()) < 4 * (15 / n) ** 0.5
    assert 2.8 < (z**4).mean() < 3.0  # 2.9 for the sum of 12 uniform ones
    assert abs((z[:, 1:] * z[:, :-1]).mean()) < 4 / n**0.5


def test_golden_random_numbers() -> None:
    """What every machine must draw, from integers alone."""
    drawn = gaussian(fold_seed(5, 0, name_number("w")), (3, 2))
    assert np.array_equal(oracle.first_right(5, 0, "w", 3, 2), drawn)
    assert (drawn * 2.0**24).ravel().tolist() == GOLDEN


@grid(
    condition=[1.0, 1e2, 1e4, 1e6],
    dtype=[torch.float32, torch.float64],
    rows__columns=[(1, 1), (2, 2), (17, 4), (64, 16), (1000, 8)],
)
def test_orthonormal_to_rounding(rows: int, columns: int, condition: float, dtype: torch.dtype) -> None:
    u = torch.linalg.qr(matrix("gaussian", (3, rows, columns)).double())[0]
    v = torch.linalg.qr(matrix("gaussian", (3, columns, columns), 1).double())[0]
    spectrum = torch.logspace(0, -math.log10(condition), columns, dtype=torch.float64)
    p = (u * spectrum @ v.mT).to(dtype)
    orthonormalize(p)
    gram = (p.mT.double() @ p.double()) if dtype == torch.float32 else p.mT @ p
    # A column that was dependent is zero.
    kept = torch.diag_embed((p != 0).any(1).double())
    assert (gram - kept).abs().max() < 12 * torch.finfo(dtype).eps
    assert condition > 1e4 or (p != 0).any(1).all()


def test_dependent_columns_become_zero() -> None:
    a, b = matrix("gaussian", (40, 1)), matrix("gaussian", (40, 1), 1)
    zero = torch.zeros(40, 1)
    p = torch.stack([torch.cat(parts, 1) for parts in ((a, a, b, a + b), (zero, a, zero, -3 * a), (zero,) * 4)])
    orthonormalize(p)
    assert [[bool((c != 0).any()) for c in x.T] for x in p] == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]


def test_orthonormal_columns_are_those_of_each_matrix_alone() -> None:
    p = matrix("gaussian", (5, 33, 3))
    alone = [x[None].clone() for x in p]
    p[3, 7, 1] = math.nan
    orthonormalize(p)
    for i, x in enumerate(alone):
        orthonormalize(x)
        assert p[i].isnan().all() if i == 3 else same(p[i], x[0])


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13, 100])
def test_tree_sum_has_the_order_of_the_page(rows: int) -> None:
    x = matrix("heavy", (2, rows, 3))
    expected = np.stack([oracle.sum_rows(m) for m in x.numpy()])[:, None]
    assert np.array_equal(tree_sum(x).numpy(), expected)


def test_norms_are_correctly_rounded() -> None:
    """Torch's own float32 root on a CPU is off in 1 of 150 cases when a tensor is long."""
    x = matrix("gaussian", (1, 1, 200_000))
    squares = x.numpy() * x.numpy()
    assert np.array_equal(norms(x).numpy(), np.sqrt(squares))


@grid(rows=[1, 7, 64, 5000], scale=[1e-40, 1e-20, 1.0, 1e30], threads=[1, 2])
def test_orthonormal_columns_have_the_bits_of_the_page(rows: int, scale: float, threads: int) -> None:
    p = matrix("heavy", (3, rows, 4)) * scale
    p[1, :, 2] = p[1, :, 0] * 3
    expected = [oracle.orthonormal_bits(m) for m in p.numpy()]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    # As other devices do it.
    other = p.clone()
    orthonormalize_by_operations(other)
    orthonormalize(p)
    torch.set_num_threads(before)
    for each in (p, other):
        for m, wanted in zip(each, expected, strict=True):
            assert torch.equal(m, torch.from_numpy(wanted))


@grid(rank=only([1, 2, 3, 4, 5], 1, 2, 4, 5), shape=[(40, 30), (300, 208)], offset=[0, 1])
def test_output_has_the_bits_of_the_page(rank: int, shape: tuple[int, int], offset: int) -> None:
    """Whatever the gradient was: all that counts are the averaged factors. Rows of whole cache lines bypass the caches."""
    p, q = matrix("heavy", (shape[0], rank)), matrix("heavy", (shape[1], rank), 1)
    states = [PowerSGD(rank, min_compression=0).start([shape]) for _ in range(2)]
    for seed, state in enumerate(states):
        out = torch.empty(offset + math.prod(shape))[offset:].view(shape)
        state.left(gradients([shape], seed))
        state.right(p.flatten())
        state.finish(q.flatten(), [out])
        expected = oracle.product_bits(oracle.orthonormal_bits(p.numpy()), q.numpy())
        assert torch.equal(out, torch.from_numpy(expected))


@grid(cover=1, shape=[(40, 30), (300, 208)], rank=only([1, 2, 3, 4, 5], 1, 2, 4, 5))
def test_residual_has_the_bits_of_the_page(rank: int, shape: tuple[int, int]) -> None:
    """Of three steps: what is given out is not taken off before the next one, or when somebody looks."""
    looked, other = (PowerSGD(rank, min_compression=0).start([shape]) for _ in range(2))
    residual = np.zeros(shape, np.float32)
    for step in range(3):
        gradient = gradients([shape], step)[0]
        for state in (looked, other):
            out = exchange([state], [[gradient]])[0][0]
        residual = residual + gradient.numpy() - out.numpy()
        assert np.array_equal(looked.state_dict()["residuals"]["0"].numpy(), residual)
    assert np.array_equal(other.state_dict()["residuals"]["0"].numpy(), residual)


def test_what_overflows_is_forgotten() -> None:
    """The matrix and its approximation are finite, but not their difference."""
    state = PowerSGD(1, min_compression=0).start([(2, 2)])
    for _ in range(2):
        state.left([torch.full((2, 2), -3e38)])
        state.right(torch.ones(2))
        state.finish(torch.full((2,), 3e38), [torch.empty(2, 2)])
        assert torch.equal(state.state_dict()["residuals"]["0"], torch.zeros(2, 2))


def test_power_of_two() -> None:
    x = torch.tensor([[[1.0, -3.0, 0.0, 1e-42, 3e38], [0.5, 4.0, -0.0, 0.0, 1.0]]])
    assert power_of_two(x).tolist() == [[[1.0, 4.0, 2.0**-126, 2.0**-126, 2.0**127]]]
    assert power_of_two(x.double()).tolist()[0][0][:3] == [1.0, 4.0, 2.0**-1022]


@grid(rank=only([1, 2, 3, 4], 1, 2, 4), threads=[1, 3], shape=[(16, 40), (33, 1025), (33, 5120), (7, 5000)])
def test_factors_are_the_products(rank: int, threads: int, shape: tuple[int, int]) -> None:
    """In pieces of rows and of columns, and the same however many threads take them."""
    x = matrix("heavy", shape)
    before = torch.get_num_threads()
    factors = []
    for count in (1, threads):
        state = PowerSGD(rank, min_compression=0).start([shape])
        torch.set_num_threads(count)
        left = state.left([x]).clone()
        right = state.right(left).clone()
        torch.set_num_threads(before)
        factors.append((left, right))
    (left, right), (other_left, other_right) = factors
    first = torch.from_numpy(gaussian(fold_seed(0, 0, name_number("0")), (shape[1], rank)))
    assert error(x.double() @ first.double(), left.view(shape[0], rank)) < 1e-6
    p = torch.from_numpy(oracle.orthonormal_bits(left.view(shape[0], rank).numpy()))
    assert error(x.double().T @ p.double(), right.view(shape[1], rank)) < 1e-6
    assert same(left, other_left)
    assert same(right, other_right)
