"""The contract of PowerSGD, its oracle, and what several ranks that share averages of factors must agree on."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from bagua_kernels.compression import fold_seed
from bagua_kernels.compression.powersgd import LowRank, PowerSGD
from bagua_kernels.compression.powersgd.orthonormal import (
    gaussian,
    name_number,
    norms,
    orthonormalize,
    orthonormalize_by_operations,
    power_of_two,
    tree_sum,
)
from bagua_kernels.compression.powersgd.stacks import Stack
from bagua_kernels.launchers import low_rank
from bagua_kernels.launchers.low_rank.passes import Passes
from tests.grids import grid
from tests.oracles import powersgd as oracle

SHAPES = [(20, 30), (5,), (8, 4, 3, 3), (20, 30), (), (20, 44), (0, 3), (6, 2, 5), (1, 7), (7, 1)]
KINDS = ("gaussian", "heavy", "sparse", "constant", "one_hot")
GOLDEN = [-9290244, 32331984, -23080700, -7003221, -12180968, 5715386]


def matrix(kind: str, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    z = rng.standard_normal(shape)
    if kind == "heavy":
        z = np.sign(z) * np.exp(2 * rng.standard_normal(shape))
    elif kind == "sparse":
        z = z * (rng.random(shape) < 0.02)
    elif kind == "constant":
        z = np.full(shape, 0.3)
    elif kind == "one_hot":
        z = np.zeros(shape)
        z.flat[rng.integers(z.size)] = -2.5
    return torch.from_numpy(np.asarray(z, np.float32))


def gradients(shapes: Sequence[Sequence[int]] = SHAPES, seed: int = 0) -> list[torch.Tensor]:
    return [matrix("gaussian", shape, 100 * seed + i) for i, shape in enumerate(shapes)]


def exchange(states: Sequence[LowRank], inputs: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """One step of all ranks, with the averages taken by hand."""
    outs = [[torch.full_like(x, 7.0) for x in tensors] for tensors in inputs]
    lefts = [state.left(tensors) for state, tensors in zip(states, inputs, strict=True)]
    average(lefts)
    rights = [state.right(left) for state, left in zip(states, lefts, strict=True)]
    average(rights)
    for state, right, out in zip(states, rights, outs, strict=True):
        state.finish(right, out)
    return outs


def average(factors: Sequence[torch.Tensor]) -> None:
    mean = torch.stack(list(factors)).mean(0)
    for factor in factors:
        factor.copy_(mean)


def residuals(state: LowRank) -> dict[str, torch.Tensor]:
    return {name: t.double() for name, t in state.state_dict()["residuals"].items()}


def forget_residuals(state: LowRank) -> None:
    saved = state.state_dict()
    state.load_state_dict({**saved, "residuals": {n: torch.zeros_like(t) for n, t in saved["residuals"].items()}})


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.double().reshape(x.shape[0], -1)


def error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y.double()).norm() / x.double().norm())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))


@grid(
    rank=[1, 2, 4],
    ranks=[1, 3],
    warm={"warm": True, "cold": False},
    dtype__close=[(torch.float32, 3e-5), (torch.float64, 1e-11)],
)
def test_equals_the_oracle(rank: int, ranks: int, warm: bool, dtype: torch.dtype, close: float) -> None:
    shapes, names, seed = [(24, 40), (40, 24), (24, 40), (24, 5, 3)], ["a", "b", "c", "ü"], 2**63 + 5
    config = PowerSGD(rank, seed=seed, min_compression=0, warm_start=warm)
    states = [config.start(shapes, names, dtype=dtype) for _ in range(ranks)]
    sides = [(s[0], math.prod(s[1:])) for s in shapes]

    def drawn(step: int) -> list[np.ndarray]:
        return [oracle.first_right(seed, step, name, m, rank) for name, (_, m) in zip(names, sides, strict=True)]

    expected = [oracle.Ranks(q, ranks, side) for q, side in zip(drawn(0), sides, strict=True)]
    for step in range(4):
        inputs = [[g.to(dtype) for g in gradients(shapes, 10 * step + r)] for r in range(ranks)]
        outs = exchange(states, inputs)
        for i, model in enumerate(expected):
            wanted = model.step([flat(tensors[i]).numpy() for tensors in inputs], None if warm else drawn(step)[i])
            assert error(torch.from_numpy(wanted), flat(outs[0][i])) < close
            for state, residual in zip(states, model.residuals, strict=True):
                assert error(torch.from_numpy(residual), flat(residuals(state)[names[i]].reshape(shapes[i]))) < close


def test_what_is_dense() -> None:
    state = PowerSGD(2, min_compression=2).start(
        [(8, 8), (16, 16), (12, 6, 4), (100,), (), (0, 9), (9, 0, 2), (3, 4000)]
    )
    # (8 + 8) * 2 * 2 = 64 = 8 * 8 is just worth it; (3 + 4000) * 2 * 2 > 12000 is not.
    assert state.dense == (3, 4, 5, 6, 7)
    assert (state.left_size, state.right_size) == (2 * (8 + 16 + 12), 2 * (8 + 16 + 24))
    assert PowerSGD(2, min_compression=2.01).start([(8, 8), (16, 16)]).dense == (0,)
    assert PowerSGD(99, min_compression=0).start([(4, 9), (9, 4)]).left_size == 4 * 4 + 9 * 4


@pytest.mark.parametrize("shapes", [[], [(3,), ()], [(0, 4)]], ids=str)
def test_nothing_to_compress(shapes: list[tuple[int, ...]]) -> None:
    state = PowerSGD().start(shapes)
    tensors = [torch.ones(shape) for shape in shapes]
    left = state.left(tensors)
    right = state.right(left)
    state.finish(right, tensors)
    assert left.shape == right.shape == (0,)
    assert state.dense == tuple(range(len(shapes)))
    assert all((t == 1).all() for t in tensors)
    assert state.step == 1


def test_dense_tensors_are_not_touched() -> None:
    state = PowerSGD(min_compression=1).start(SHAPES)
    out = exchange([state], [gradients()])[0]
    assert all((out[i] == 7).all() for i in state.dense)
    assert not any((out[i] == 7).any() for i in range(len(SHAPES)) if i not in state.dense)


@pytest.mark.parametrize(
    ("kind", "rank"), [("constant", 1), ("one_hot", 1), ("one_hot", 3), ("sparse", 30), ("gaussian", 30), ("heavy", 30)]
)
def test_enough_rank_is_exact(kind: str, rank: int) -> None:
    x = matrix(kind, (30, 50))
    state = PowerSGD(rank, min_compression=0).start([x.shape])
    for _ in range(3):
        assert error(x, exchange([state], [[x]])[0][0]) < 3e-6


@pytest.mark.parametrize("rank", [1, 3, 8, 16])
def test_deficient_matrix_is_exact(rank: int) -> None:
    """To the rounding of P, whose span it magnifies by P's condition; a draw can be unlucky, a warm start is not."""
    x = matrix("gaussian", (30, rank), 1) @ matrix("gaussian", (rank, 50), 2)
    for seed in range(5):
        state = PowerSGD(rank, seed=seed, min_compression=0).start([x.shape])
        condition = float(torch.linalg.cond(state.left([x]).view(30, rank).double()))
        for step in range(4):
            close = 3e-6 if step >= 2 else max(3e-6, 1e-7 * condition)
            assert error(x, exchange([state], [[x]])[0][0]) < close


def test_rank_of_the_matrix_is_exact() -> None:
    """Clipped to the lesser side, also where the matrix is of lower rank or zero."""
    shapes = [(6, 40), (40, 6), (1, 9), (9, 1), (1, 1), (6, 40), (5, 5)]
    tensors = gradients(shapes)
    tensors[5] = tensors[5][:, :1] * torch.arange(40.0)
    tensors[6].zero_()
    out = exchange([PowerSGD(50, min_compression=0).start(shapes)], [tensors])[0]
    assert all(error(x, y) < 3e-6 for x, y in zip(tensors[:-1], out, strict=False))
    assert (out[6] == 0).all()


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("kind", KINDS)
def test_contraction(kind: str, warm: bool) -> None:
    for rank in (1, 2, 4):
        state = PowerSGD(rank, min_compression=0, warm_start=warm).start([(40, 60)] * 3)
        for step in range(5):
            forget_residuals(state)
            inputs = [matrix(kind, (40, 60), 3 * step + i) for i in range(3)]
            for x, y in zip(inputs, exchange([state], [inputs])[0], strict=True):
                assert error(x, y) <= 1 + 1e-6


def test_gaussian_matrix_loses_the_expected_share() -> None:
    """With random Q, the rank-1 factors of an orthogonal matrix hold 1 / n of it, which is the least on average."""
    x = torch.linalg.qr(matrix("gaussian", (16, 16)))[0]
    state = PowerSGD(1, min_compression=0).start([(16, 16)])
    assert error(x, exchange([state], [[x]])[0][0]) ** 2 == pytest.approx(15 / 16, rel=1e-5)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_warm_start_converges_to_the_best_approximation(rank: int) -> None:
    x = matrix("gaussian", (50, 70))
    state = PowerSGD(rank, min_compression=0).start([x.shape])
    first = error(x, exchange([state], [[x]])[0][0])
    for _ in range(60):
        forget_residuals(state)
        last = error(x, exchange([state], [[x]])[0][0])
    best = oracle.best_error(x.double().numpy(), rank) / float(x.norm())
    assert best * (1 - 1e-5) < last < best * 1.01 < first


def test_cold_start_draws_anew_each_step() -> None:
    state = PowerSGD(1, min_compression=0, warm_start=False).start([(9, 9)])
    x = matrix("gaussian", (9, 9))
    lefts = []
    for _ in range(3):
        forget_residuals(state)
        lefts.append(state.left([x]).clone())
        exchange([state], [[x]])
    assert all(error(a, b) > 0.1 for a, b in zip(lefts[1:], lefts, strict=False))


def test_a_column_that_became_zero_recovers() -> None:
    """After gradients of rank 0 and 1, those of rank 2 are exact at once."""
    state = PowerSGD(2, min_compression=0).start([(12, 18)])
    rows, columns = matrix("gaussian", (12, 2)), matrix("gaussian", (2, 18), 1)
    for used in (0, 1, 2):
        x = rows[:, :used] @ columns[:used]
        out = exchange([state], [[x]])[0][0]
        assert float((x - out).norm()) <= 3e-6 * float(x.norm())


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=str)
@pytest.mark.parametrize("of", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_error_feedback_loses_nothing(of: torch.dtype, dtype: torch.dtype, close: float) -> None:
    """Also what the dtype of the output rounds away."""
    state = PowerSGD(2, min_compression=1).start(SHAPES, dtype=dtype)
    sent, given = ([torch.zeros(s, dtype=torch.float64) for s in SHAPES] for _ in range(2))
    for step in range(10):
        inputs = [g.to(of) for g in gradients(seed=step)]
        for i, out in enumerate(exchange([state], [inputs])[0]):
            assert out.dtype == of
            sent[i] += out.double()
            given[i] += inputs[i].double()
    for name, left_over in residuals(state).items():
        i = int(name)
        assert error(given[i], sent[i] + left_over.reshape(SHAPES[i])) < close


@pytest.mark.parametrize("loaded", [False, True])
def test_release_hands_residuals_over_once(loaded: bool) -> None:
    """Dense tensors and right factors stay as they are, whatever the strides."""
    state = PowerSGD(2, min_compression=1).start(SHAPES)
    exchange([state], [gradients()])
    saved = state.state_dict()
    if loaded:
        state = PowerSGD(2, min_compression=1).start(SHAPES)
        state.load_state_dict(saved)
    plain = gradients(seed=1)
    tensors = [g.t().contiguous().t() if g.dim() == 2 else g.clone() for g in plain]
    state.release(tensors)
    for i, (before, after) in enumerate(zip(plain, tensors, strict=True)):
        residual = saved["residuals"].get(str(i))
        assert (residual is None) == (i in state.dense)
        assert torch.equal(after, before if residual is None else before + residual.view(before.shape))
    assert not any(residual.any() for residual in residuals(state).values())
    assert all(torch.equal(right, saved["rights"][name]) for name, right in state.state_dict()["rights"].items())
    again = [t.clone() for t in tensors]
    state.release(again)
    assert all(torch.equal(a, b) for a, b in zip(again, tensors, strict=True))
    # The next step is as ever.
    assert all(out.isfinite().all() for out in exchange([state], [plain])[0])
    with pytest.raises(ValueError, match="tensors"):
        state.release(tensors[1:])


@grid(ranks=[2, 3, 4, 5, 7, 8], warm={"warm": True, "cold": False}, cover=1)
def test_ranks_agree(ranks: int, warm: bool) -> None:
    """All outputs are equal bit for bit, and the mean of the residuals is the mean of the inputs less the output."""
    config = PowerSGD(2, seed=3, min_compression=1, warm_start=warm)
    states = [config.start(SHAPES) for _ in range(ranks)]
    for step in range(3):
        inputs = [gradients(seed=10 * step + r) for r in range(ranks)]
        before = [residuals(state) for state in states]
        outs = exchange(states, inputs)
        after = [residuals(state) for state in states]
        for name in after[0]:
            i = int(name)
            assert all(same(out[i], outs[0][i]) for out in outs)
            total = sum(flat(x[i]) + e[name] for x, e in zip(inputs, before, strict=True)) / ranks
            assert error(total - flat(outs[0][i]), sum(e[name] for e in after) / ranks) < 1e-5
        rights = [state.state_dict()["rights"] for state in states]
        assert all(same(q[name], rights[0][name]) for q in rights for name in q)


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("exponent", [-100, -60, 60, 100])
def test_scale_invariance(exponent: int, warm: bool) -> None:
    """A power of two goes through exactly."""
    scale = 2.0**exponent
    plain, scaled = (PowerSGD(3, min_compression=0, warm_start=warm).start([(20, 30)]) for _ in range(2))
    for step in range(5):
        x = matrix("gaussian", (20, 30), step)
        expected, out = exchange([plain], [[x]])[0][0], exchange([scaled], [[x * scale]])[0][0]
        assert same(expected * scale, out)
        assert out.isfinite().all()


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30])
def test_extreme_scales_lose_nothing(scale: float) -> None:
    x = (matrix("gaussian", (20, 1)) @ matrix("gaussian", (1, 30), 1)) * scale
    state = PowerSGD(2, min_compression=0).start([(20, 30)])
    for _ in range(3):
        assert error(x / scale, exchange([state], [[x]])[0][0] / scale) < 1e-5


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("warm_steps", [0, 2])
def test_not_finite_goes_through_and_is_forgotten(bad: float, warm_steps: int) -> None:
    """Only its own matrix suffers, on all ranks, and one step later nothing is left of it."""
    shapes = [(20, 30), (20, 30), (30, 20)]
    states = [PowerSGD(2, min_compression=0).start(shapes) for _ in range(2)]
    for step in range(warm_steps):
        exchange(states, [gradients(shapes, 2 * step + r) for r in range(2)])
    before = [state.state_dict() for state in states]
    inputs = [gradients(shapes, 50), gradients(shapes, 51)]
    inputs[1][1][3, 4] = bad
    outs = exchange(states, inputs)
    for state, old, out in zip(states, before, outs, strict=True):
        assert out[1].isnan().all()
        assert out[0].isfinite().all()
        assert out[2].isfinite().all()
        new = state.state_dict()
        for key in ("residuals", "rights"):
            assert same(new[key]["1"], old[key]["1"])
            assert not torch.equal(new[key]["0"], old[key]["0"])
    assert all(
        x.isfinite().all() for out in exchange(states, [gradients(shapes, 60 + r) for r in range(2)]) for x in out
    )


def test_not_finite_meets_a_zero_of_the_right_factor() -> None:
    """A column that was zero has a zero in Q, which no library may use to skip an inf."""
    state = PowerSGD(1, min_compression=0).start([(9, 8)])
    x = matrix("gaussian", (9, 8))
    x[:, 5] = 0
    exchange([state], [[x]])
    assert (state.state_dict()["rights"]["0"][5] == 0).all()
    x[2, 5] = math.inf
    assert exchange([state], [[x]])[0][0].isnan().all()


def test_float16_overflow_of_the_output_is_forgotten() -> None:
    """The input is finite, but its approximation is beyond float16: the step is lost, the residual is not."""
    x = torch.zeros(2, 2, dtype=torch.float16)
    x[0, 0] = 65504
    state = PowerSGD(2, min_compression=0).start([(2, 2)])
    state.load_state_dict({**state.state_dict(), "residuals": {"0": torch.tensor([[1000.0, 0], [0, 1]])}})
    out = exchange([state], [[x]])[0][0]
    assert out[0, 0].isinf()
    assert torch.equal(state.state_dict()["residuals"]["0"], torch.tensor([[1000.0, 0], [0, 1]]))


def test_saved_state_resumes_bit_for_bit_in_another_order() -> None:
    shapes, names = [(20, 30), (8,), (8, 4, 3, 3), (30, 20)], ["a", "b", "c", "d"]
    order = [3, 1, 0, 2]
    for warm in (True, False):
        config = PowerSGD(2, seed=9, min_compression=0, warm_start=warm)
        state = config.start(shapes, names)
        for step in range(3):
            exchange([state], [gradients(shapes, step)])
        file = io.BytesIO()
        torch.save(state.state_dict(), file)
        file.seek(0)
        other = config.start([shapes[i] for i in order], [names[i] for i in order])
        # Whatever happened before, also in the middle of a step, is forgotten.
        other.left([gradients(shapes)[i] for i in order])
        other.load_state_dict(torch.load(file, weights_only=True))
        assert other.step == 3
        for step in range(3, 5):
            x = gradients(shapes, step)
            first, second = exchange([state], [x])[0], exchange([other], [[x[i] for i in order]])[0]
            assert all(same(first[i], second[k]) for k, i in enumerate(order))


def test_saved_state_is_a_copy() -> None:
    state = PowerSGD(min_compression=0).start([(4, 5)])
    saved = state.state_dict()
    exchange([state], [gradients([(4, 5)])])
    assert (saved["residuals"]["0"] == 0).all()


def test_a_step_that_broke_off_is_repeated() -> None:
    states = [PowerSGD(2, min_compression=0).start([(20, 30)]) for _ in range(2)]
    x = gradients([(20, 30)])
    for state in states:
        exchange([state], [x])
    states[0].right(states[0].left(x).mul_(3))
    assert same(exchange(states[:1], [x])[0][0], exchange(states[1:], [x])[0][0])


def test_tensors_may_be_strided_and_written_in_place() -> None:
    shape = (8, 6, 3, 3)
    x = matrix("gaussian", shape)
    strided = torch.zeros(shape).to(memory_format=torch.channels_last).copy_(x)
    states = [PowerSGD(2, min_compression=0).start([shape]) for _ in range(2)]
    expected = exchange(states[:1], [[x]])[0][0]
    states[1].finish(states[1].right(states[1].left([strided])), [strided])
    assert strided.is_contiguous(memory_format=torch.channels_last)
    assert same(expected, strided.contiguous())


def test_factors_may_come_back_elsewhere() -> None:
    state, other = (PowerSGD(2, min_compression=0).start([(8, 9)]) for _ in range(2))
    x = gradients([(8, 9)])
    out = torch.empty(8, 9)
    state.finish(state.right(state.left(x).clone()).clone(), [out])
    assert same(out, exchange([other], [x])[0][0])


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


@grid(rank=[1, 2, 3, 4, 5], shape=[(40, 30), (300, 208)], offset=[0, 1])
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


@pytest.mark.parametrize("shape", [(40, 30), (300, 208)], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"seed": -1}, "seed must be from 0"),
        ({"seed": 2**64}, "seed must be from 0"),
        ({"min_compression": -1.0}, "min_compression must be"),
        ({"min_compression": math.nan}, "min_compression must be"),
    ],
)
def test_wrong_configuration(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PowerSGD(**options)


def test_wrong_start() -> None:
    with pytest.raises(ValueError, match=r"dtype must be torch.float32 or torch.float64, got torch.float16"):
        PowerSGD().start([], dtype=torch.float16)
    for names in (["a"], ["a", "a"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match="a different name for each of 2 shapes"):
            PowerSGD().start([(2, 2), (2, 2)], names)


def test_wrong_arguments() -> None:
    state = PowerSGD(min_compression=0).start([(4, 6), (3,)])
    x, y = torch.ones(4, 6), torch.ones(3)
    with pytest.raises(ValueError, match="expected 2 tensors"):
        state.left([x])
    with pytest.raises(ValueError, match=r"tensors\[0\] \('0'\): expected shape \(4, 6\).*got \(6, 4\)"):
        state.left([x.T, y])
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(ValueError, match=f"got .*{dtype}"):
            state.left([x.to(dtype), y])
    with pytest.raises(ValueError, match=r"got .*meta"):
        state.left([x.to("meta"), y])
    left = state.left([x, y])
    for wrong in (left[:-1], left.double(), left.to("meta")):
        with pytest.raises(ValueError, match="`right` expected factors of shape"):
            state.right(wrong)
    right = state.right(left)
    with pytest.raises(ValueError, match="`finish` expected factors of shape"):
        state.finish(right[:-1], [x, y])
    with pytest.raises(ValueError, match="expected 2 out"):
        state.finish(right, [x])
    state.finish(right, [x, y])


def test_wrong_order_of_calls() -> None:
    state = PowerSGD(min_compression=0).start([(4, 6)])
    x = [torch.ones(4, 6)]
    with pytest.raises(RuntimeError, match="call `left` next, not `right`"):
        state.right(torch.zeros(4))
    left = state.left(x)
    with pytest.raises(RuntimeError, match="call `right` next, not `finish`"):
        state.finish(torch.zeros(6), x)
    state.finish(state.right(left), x)
    with pytest.raises(RuntimeError, match="call `left` next, not `finish`"):
        state.finish(torch.zeros(6), x)


def test_wrong_saved_state_changes_nothing() -> None:
    config = PowerSGD(2, min_compression=0)
    state = config.start([(4, 6), (6, 8)], ["a", "b"])
    exchange([state], [gradients([(4, 6), (6, 8)])])
    before = state.state_dict()
    for other in (
        config.start([(4, 6), (6, 8)], ["a", "c"]),
        config.start([(4, 6)], ["a"]),
        config.start([(4, 6), (6, 9)], ["a", "b"]),
        PowerSGD(1, min_compression=0).start([(4, 6), (6, 8)], ["a", "b"]),
    ):
        with pytest.raises(ValueError, match=r"of \[.*expected shapes.*got.*start with"):
            state.load_state_dict(other.state_dict())
    after = state.state_dict()
    assert all(same(after[key][name], before[key][name]) for key in ("residuals", "rights") for name in "ab")


def placed(gap: int, *shape: int) -> torch.Tensor:
    """Room for one matrix, so many elements behind the beginning of a cache line."""
    memory = torch.full((math.prod(shape) + 32,), 7.0)
    begin = -memory.data_ptr() // 4 % 16 + gap
    return memory[begin : begin + math.prod(shape)].view(1, *shape)


@grid(rank=[1, 2, 3, 4, 5], columns=[5, 48, 150, 304], cover=1)
def test_passes_do_not_depend_on_where_memory_is(rank: int, columns: int) -> None:
    """Whether rows are written past the caches or not, and whether they end with a whole vector or not."""
    rows = 7
    generator = torch.Generator().manual_seed(columns)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(1, *shape, generator=generator)

    before, gradient = numbers(rows, columns), numbers(rows, columns)
    before_left, before_right, p = numbers(rows, rank), numbers(rank, columns), numbers(rows, rank)
    kept = numbers(columns, rank)
    found = []
    for gap in (0, 1, 8, 16):
        total, out = placed(gap, rows, columns), placed(gap, rows, columns)
        assert (total.data_ptr() % 64 == 0) == (gap in (0, 16))
        left, right, turned = torch.zeros(1, rows, rank), torch.zeros(1, columns, rank), torch.zeros(1, rank, columns)
        others = (before_left.clone(), before_right.clone())
        stack = (total, before, *others, left, right, kept, kept, turned, torch.zeros(1, rows, rank))
        passes = Passes([stack])
        assert passes.project([stack], [0], [[gradient[0]]]) == [[True]]
        results = [total.clone(), left.clone()]
        total.fill_(7)
        left.copy_(p)
        assert passes.project_and_gather([stack], [0], [[gradient[0]]]) == [[True]]
        results += [total.clone(), right.clone()]
        passes.gather([stack])
        results.append(right.clone())
        assert passes.approximate([stack], [0], [[out[0]]], low_rank.KEEP_NOTHING) == [[True]]
        found.append([*results, out.clone()])
    assert same(found[0][0], found[0][2])
    assert same(found[0][3], found[0][4])
    for results in found[1:]:
        assert all(map(same, results, found[0]))


def test_stacks_have_the_order_of_the_table() -> None:
    first, last = (low_rank.FIELDS.index(name) for name in ("TOTAL", "GIVEN"))
    assert [name.upper() for name in Stack._fields[1:]] == list(low_rank.FIELDS[first:last])


def test_an_output_that_cannot_be_written_keeps_nothing() -> None:
    """As if the step had not been."""
    states = [PowerSGD(2, min_compression=0).start([(4, 6)]) for _ in range(2)]
    for step in range(2):
        x = gradients([(4, 6)], step)
        right = states[0].right(states[0].left(x))
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            states[0].finish(right, [torch.empty(1, 6).expand(4, 6)])
        assert same(exchange(states[:1], [x])[0][0], exchange(states[1:], [x])[0][0])
    saved = [state.state_dict()["residuals"]["0"] for state in states]
    assert same(*saved)


def test_a_copy_goes_its_own_way() -> None:
    state = PowerSGD(2, min_compression=0).start([(20, 30), (20, 30)])
    exchange([state], [gradients([(20, 30)] * 2)])
    other = copy.deepcopy(state)
    before = other.state_dict()
    expected = exchange([state], [gradients([(20, 30)] * 2, 1)])[0]
    assert all(same(other.state_dict()["residuals"][name], before["residuals"][name]) for name in "01")
    assert all(map(same, exchange([other], [gradients([(20, 30)] * 2, 1)])[0], expected))


def test_matrices_of_several_dtypes_in_one_step() -> None:
    """Those of float32 are compiled; the others must come out as ever."""
    shapes = [(20, 30), (30, 20), (20, 30)]
    states = [PowerSGD(2, min_compression=0).start(shapes) for _ in range(2)]
    for step in range(3):
        x = gradients(shapes, step)
        x[1] = x[1].bfloat16().float()
        mixed = [x[0], x[1].bfloat16(), x[2]]
        plain, out = exchange(states[:1], [x])[0], exchange(states[1:], [mixed])[0]
        assert same(plain[0], out[0])
        assert same(plain[2], out[2])
        assert error(plain[1], out[1]) < 0.02 if step == 0 else out[1].isfinite().all()


def test_lazily_negated_gradients_are_read_as_they_are() -> None:
    """Their memory holds the opposite."""
    shape = (8, 9)
    x = matrix("gaussian", shape)
    negated = torch.complex(torch.zeros(shape), -x).conj().imag
    assert negated.is_neg()
    states = [PowerSGD(2, min_compression=0).start([shape]) for _ in range(2)]
    expected, out = (exchange([state], [[given]])[0][0] for state, given in zip(states, (x, negated), strict=True))
    assert error(expected, out) < 1e-6


@grid(rank=[1, 2, 3, 4], threads=[1, 3], shape=[(16, 40), (33, 1025), (33, 5120), (7, 5000)])
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
