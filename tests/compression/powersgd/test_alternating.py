"""PowerSGD's steps that make one factor in turn: their oracle, and what several ranks must agree on."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from bagua_kernels.compression import AlternatingLowRank, PowerSGD
from tests.compression.powersgd.ranks import SHAPES, average, error, flat, gradients, matrix, residuals, same
from tests.grids import grid, only
from tests.oracles import powersgd as oracle

Tensors = Sequence[torch.Tensor]
# Each compiles passes of its own.
RANKS = only([1, 2, 3, 4], 1, 2, 4)


def start(
    rank: int, shapes: Sequence[Sequence[int]], names: Sequence[str] | None = None, **options: object
) -> AlternatingLowRank:
    dtype = options.pop("dtype", torch.float32)
    config = PowerSGD(rank, alternate=True, **{"min_compression": 0, **options})  # type: ignore[arg-type]
    state = config.start(shapes, names, dtype=dtype)  # type: ignore[arg-type]
    assert isinstance(state, AlternatingLowRank)
    return state


def exchange(states: Sequence[AlternatingLowRank], inputs: Sequence[Tensors]) -> list[list[torch.Tensor]]:
    outs = [[torch.full_like(x, 7.0) for x in tensors] for tensors in inputs]
    factors = [state.factor(tensors) for state, tensors in zip(states, inputs, strict=True)]
    average(factors)
    for state, factor, out in zip(states, factors, outs, strict=True):
        state.finish(factor, out)
    return outs


@grid(aligned=[True, False], rank=RANKS, ranks=[1, 3], dtype__close=[(torch.float32, 3e-5), (torch.float64, 1e-11)])
def test_equals_the_oracle(aligned: bool, rank: int, ranks: int, dtype: torch.dtype, close: float) -> None:
    """Matrices of numbers of rows and columns that are whole blocks or not; written past the caches or not."""
    # The one of fewest rows lies first in memory, and shifts the others: that of 304 columns, of whole cache lines.
    few = (7, 8, 4) if aligned else (7, 5, 3)
    shapes, seed = [(24, 40), (40, 24), (24, 40), few, (8, 1030), (21, 304)], 2**63 + 5
    names = ["a", "b", "c", "ü", "e", "f"]
    states = [start(rank, shapes, names, seed=seed, dtype=dtype) for _ in range(ranks)]
    expected = []
    for name, shape in zip(names, shapes, strict=True):
        n, m = shape[0], math.prod(shape[1:])
        first, other = oracle.first_right(seed, 0, name, m, rank), oracle.first_right(seed, 1, name, n, rank)
        expected.append(oracle.AlternatingRanks(first, other, ranks))
    for step in range(5):
        inputs = [[g.to(dtype) for g in gradients(shapes, 10 * step + r)] for r in range(ranks)]
        outs = exchange(states, inputs)
        for i, model in enumerate(expected):
            wanted = model.step([flat(tensors[i]).numpy() for tensors in inputs])
            assert error(torch.from_numpy(wanted), flat(outs[0][i])) < close
            for state, residual in zip(states, model.residuals, strict=True):
                assert error(torch.from_numpy(residual), flat(residuals(state)[names[i]].reshape(shapes[i]))) < close


def test_factors_take_turns() -> None:
    state = start(2, [(20, 30), (5,), (30, 50)], min_compression=1)
    sizes = []
    for step in range(4):
        x = gradients([(20, 30), (5,), (30, 50)], step)
        sizes.append(state.factor(x).numel())
        exchange([state], [x])
    assert sizes == [state.left_size, state.right_size] * 2 == [100, 160] * 2


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_ranks_agree(ranks: int) -> None:
    """All outputs are equal bit for bit, and the mean of the residuals is the mean of the inputs less the output."""
    states = [start(2, SHAPES, seed=3, min_compression=1) for _ in range(ranks)]
    for step in range(4):
        inputs = [gradients(seed=10 * step + r) for r in range(ranks)]
        before = [residuals(state) for state in states]
        outs = exchange(states, inputs)
        after = [residuals(state) for state in states]
        for name in after[0]:
            i = int(name)
            assert all(same(out[i], outs[0][i]) for out in outs)
            total = sum(flat(x[i]) + e[name] for x, e in zip(inputs, before, strict=True)) / ranks
            assert error(total - flat(outs[0][i]), sum(e[name] for e in after) / ranks) < 1e-5
            # A projection makes nothing longer.
            assert float(outs[0][i].norm()) <= (1 + 1e-5) * float(torch.as_tensor(total).norm())


@grid(
    cover=1,
    dtype__close=[(torch.float32, 1e-5), (torch.float64, 1e-10)],
    of=[torch.float32, torch.float16, torch.bfloat16],
)
def test_error_feedback_loses_nothing(of: torch.dtype, dtype: torch.dtype, close: float) -> None:
    state = start(2, SHAPES, dtype=dtype, min_compression=1)
    sent, given = ([torch.zeros(s, dtype=torch.float64) for s in SHAPES] for _ in range(2))
    for step in range(9):
        inputs = [g.to(of) for g in gradients(seed=step)]
        for i, out in enumerate(exchange([state], [inputs])[0]):
            sent[i] += out.double()
            given[i] += inputs[i].double()
    for name, left_over in residuals(state).items():
        i = int(name)
        assert error(given[i], sent[i] + left_over.reshape(SHAPES[i])) < close


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_converges_to_the_best_approximation(rank: int) -> None:
    """Of the same matrix without residuals, whose next approximation begins with the factor that was made."""
    x = matrix("gaussian", (30, 40))
    state = start(rank, [(30, 40)])
    for _ in range(400):
        saved = state.state_dict()
        state.load_state_dict({**saved, "residuals": {"0": torch.zeros(30, 40)}})
        out = exchange([state], [[x]])[0][0]
    best = oracle.best_error(x.double().numpy(), rank)
    assert float((x - out).norm()) <= 1.01 * best


def test_a_column_that_became_zero_recovers() -> None:
    """After gradients of rank 0 and 1, those of rank 2 are exact when both sides had a turn."""
    state = start(2, [(12, 18)])
    rows, columns = matrix("gaussian", (12, 2)), matrix("gaussian", (2, 18), 1)
    for used in (0, 1, 2):
        x = rows[:, :used] @ columns[:used]
        for _ in range(4):
            exchange([state], [[x]])
        assert float(residuals(state)["0"].norm()) <= 1e-4 * float(x.norm())


@pytest.mark.parametrize("exponent", only([-100, -60, 60, 100], -100, 60))
def test_scale_invariance(exponent: int) -> None:
    """A power of two goes through exactly."""
    scale = 2.0**exponent
    plain, scaled = (start(3, [(20, 30)]) for _ in range(2))
    for step in range(5):
        x = matrix("gaussian", (20, 30), step)
        expected, out = exchange([plain], [[x]])[0][0], exchange([scaled], [[x * scale]])[0][0]
        assert same(expected * scale, out)
        assert out.isfinite().all()


@grid(steps=[0, 1, 2, 3], bad=[math.inf, -math.inf, math.nan], cover=1)
def test_not_finite_goes_through_and_is_forgotten(bad: float, steps: int) -> None:
    """Only its own matrix suffers, on all ranks, and one step later nothing is left of it."""
    shapes = [(20, 30), (20, 30), (30, 20)]
    states = [start(2, shapes) for _ in range(2)]
    for step in range(steps):
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
        assert all(same(new[key]["1"], old[key]["1"]) for key in ("residuals", "rights", "lefts"))
        assert not torch.equal(new["residuals"]["0"], old["residuals"]["0"])
        made = "rights" if steps % 2 else "lefts"
        assert not torch.equal(new[made]["0"], old[made]["0"])
    for step in range(2):
        outs = exchange(states, [gradients(shapes, 60 + 2 * step + r) for r in range(2)])
        assert all(x.isfinite().all() for out in outs for x in out)


@grid(cover=1, rank=[1, 2, 3, 4, 5], steps=[2, 3])
def test_saved_state_resumes_bit_for_bit_in_another_order(steps: int, rank: int) -> None:
    shapes, names = [(20, 30), (8,), (8, 4, 3, 3), (30, 20)], ["a", "b", "c", "d"]
    order = [3, 1, 0, 2]
    state = start(rank, shapes, names, seed=9)
    for step in range(steps):
        exchange([state], [gradients(shapes, step)])
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    other = start(rank, [shapes[i] for i in order], [names[i] for i in order], seed=9)
    other.factor([gradients(shapes)[i] for i in order])
    other.load_state_dict(torch.load(file, weights_only=True))
    for step in range(steps, steps + 3):
        x = gradients(shapes, step)
        first, second = exchange([state], [x])[0], exchange([other], [[x[i] for i in order]])[0]
        assert all(same(first[i], second[k]) for k, i in enumerate(order))
    saved = state.state_dict()
    del saved["lefts"]
    with pytest.raises(ValueError, match=r"lefts of .*'a'.*expected shapes"):
        other.load_state_dict(saved)


@grid(cover=1, steps=[1, 2])
def test_a_step_that_broke_off_is_repeated(steps: int) -> None:
    states = [start(2, [(20, 30)]) for _ in range(2)]
    x = gradients([(20, 30)])
    for _ in range(steps):
        exchange(states, [x, x])
    states[0].factor(gradients([(20, 30)], 5)).mul_(3)
    assert same(exchange(states[:1], [x])[0][0], exchange(states[1:], [x])[0][0])


def test_a_copy_goes_its_own_way() -> None:
    state = start(2, [(20, 30), (20, 30)])
    exchange([state], [gradients([(20, 30)] * 2)])
    other = copy.deepcopy(state)
    for step in (1, 2):
        x = gradients([(20, 30)] * 2, step)
        expected = exchange([state], [x])[0]
        assert all(map(same, exchange([other], [x])[0], expected))


def test_matrices_of_several_dtypes_in_one_step() -> None:
    """Those of float32 are compiled; the others must come out as ever."""
    shapes = [(20, 30), (30, 20), (20, 30)]
    states = [start(2, shapes) for _ in range(2)]
    for step in range(4):
        x = gradients(shapes, step)
        x[1] = x[1].bfloat16().float()
        plain, out = exchange(states[:1], [x])[0], exchange(states[1:], [[x[0], x[1].bfloat16(), x[2]]])[0]
        assert same(plain[0], out[0])
        assert same(plain[2], out[2])
        assert error(plain[1], out[1]) < 0.02 if step == 0 else out[1].isfinite().all()


@grid(rank=RANKS, threads=[1, 3], shape=[(16, 40), (33, 1025), (33, 5120), (7, 5000)])
def test_factors_are_the_products(rank: int, threads: int, shape: tuple[int, int]) -> None:
    """In pieces of rows and of columns, and the same however many threads take them."""
    before = torch.get_num_threads()
    runs = []
    for count in (1, threads):
        state = start(rank, [shape])
        torch.set_num_threads(count)
        factors = []
        for step in range(3):
            x = matrix("heavy", shape, step)
            m = flat(x) + residuals(state)["0"].double()
            factors.append(state.factor([x]).clone())
            basis = oracle.orthonormal_bits(factors[-2].view(-1, rank).numpy()) if step else None
            if basis is not None:
                seen = m if step % 2 == 0 else m.T
                assert error(seen @ torch.from_numpy(basis).double(), factors[-1].view(-1, rank)) < 1e-5
            state.finish(factors[-1].clone(), [torch.empty(shape)])
        torch.set_num_threads(before)
        runs.append(factors)
    assert all(same(*pair) for pair in zip(*runs, strict=True))


def test_strided_tensors_and_factors_from_elsewhere() -> None:
    shape = (8, 6, 3, 3)
    states = [start(2, [shape]) for _ in range(2)]
    for step in range(3):
        x = matrix("gaussian", shape, step)
        strided = torch.zeros(shape).to(memory_format=torch.channels_last).copy_(x)
        expected = exchange(states[:1], [[x]])[0][0]
        states[1].finish(states[1].factor([strided]).clone(), [strided])
        assert same(expected, strided.contiguous())


def test_release_hands_residuals_over_once() -> None:
    state = start(2, SHAPES, min_compression=1)
    exchange([state], [gradients()])
    saved = state.state_dict()
    plain = gradients(seed=1)
    tensors = [g.clone() for g in plain]
    state.release(tensors)
    for i, (before, after) in enumerate(zip(plain, tensors, strict=True)):
        residual = saved["residuals"].get(str(i))
        assert torch.equal(after, before if residual is None else before + residual.view(before.shape))
    assert not any(residual.any() for residual in residuals(state).values())
    assert all(out.isfinite().all() for out in exchange([state], [plain])[0])


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match="alternate=True got warm_start=False"):
        PowerSGD(alternate=True, warm_start=False)
    state = start(1, [(4, 6)])
    x = [torch.ones(4, 6)]
    with pytest.raises(RuntimeError, match="call `factor` next, not `finish`; a step is `factor`, `finish`"):
        state.finish(torch.zeros(4), x)
    factor = state.factor(x)
    with pytest.raises(ValueError, match=r"`finish` expected factors of shape \(4,\).*got \(6,\)"):
        state.finish(torch.zeros(6), x)
    state.finish(factor, x)
    state.factor(x)
    with pytest.raises(ValueError, match=r"`finish` expected factors of shape \(6,\).*got \(4,\)"):
        state.finish(torch.zeros(4), x)
    assert np.isfinite(state.factor(x).numpy()).all()
