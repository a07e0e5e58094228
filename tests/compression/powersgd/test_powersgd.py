"""The contract of PowerSGD, its oracle, and what several ranks that share averages of factors must agree on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bagua_kernels.compression.powersgd import LowRank, PowerSGD
from tests.compression.powersgd.ranks import SHAPES, error, exchange, flat, gradients, matrix, residuals, same
from tests.grids import grid
from tests.oracles import powersgd as oracle

KINDS = ("gaussian", "heavy", "sparse", "constant", "one_hot")


def forget_residuals(state: LowRank) -> None:
    saved = state.state_dict()
    state.load_state_dict({**saved, "residuals": {n: torch.zeros_like(t) for n, t in saved["residuals"].items()}})


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


@grid(
    cover=1,
    kind__rank=[("constant", 1), ("one_hot", 1), ("one_hot", 3), ("sparse", 30), ("gaussian", 30), ("heavy", 30)],
)
def test_enough_rank_is_exact(kind: str, rank: int) -> None:
    x = matrix(kind, (30, 50))
    state = PowerSGD(rank, min_compression=0).start([x.shape])
    for _ in range(3):
        assert error(x, exchange([state], [[x]])[0][0]) < 3e-6


@grid(cover=1, rank=[1, 3, 8, 16])
def test_deficient_matrix_is_exact(rank: int) -> None:
    """To the rounding of P, whose span it magnifies by P's condition; a draw can be unlucky, a warm start is not."""
    x = matrix("gaussian", (30, rank), 1) @ matrix("gaussian", (rank, 50), 2)
    for seed in range(5):
        state = PowerSGD(rank, seed=seed, min_compression=0).start([x.shape])
        condition = float(torch.linalg.cond(state.left([x]).view(30, rank).double()))
        for step in range(4):
            close = 3e-6 if step >= 2 else max(3e-6, 1e-7 * condition)
            assert error(x, exchange([state], [[x]])[0][0]) < close


@pytest.mark.slow
def test_rank_of_the_matrix_is_exact() -> None:
    """Clipped to the lesser side, also where the matrix is of lower rank or zero."""
    shapes = [(6, 40), (40, 6), (1, 9), (9, 1), (1, 1), (6, 40), (5, 5)]
    tensors = gradients(shapes)
    tensors[5] = tensors[5][:, :1] * torch.arange(40.0)
    tensors[6].zero_()
    out = exchange([PowerSGD(50, min_compression=0).start(shapes)], [tensors])[0]
    assert all(error(x, y) < 3e-6 for x, y in zip(tensors[:-1], out, strict=False))
    assert (out[6] == 0).all()


@grid(cover=1, warm={"warm": True, "cold": False}, kind=KINDS)
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


@grid(cover=1, rank=[1, 2, 4])
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


@pytest.mark.slow
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


@grid(cover=1, warm={"warm": True, "cold": False}, exponent=[-100, -60, 60, 100])
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


@grid(cover=1, bad=[math.inf, -math.inf, math.nan], warm_steps=[0, 2])
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
