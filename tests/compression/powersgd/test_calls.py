"""Calls of PowerSGD's state: their order, saved states, memory, and arguments that are refused."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch

from bagua_kernels.compression.powersgd import AlternatingLowRank, PowerSGD
from bagua_kernels.compression.powersgd.stacks import Stack
from bagua_kernels.launchers import low_rank
from bagua_kernels.launchers.low_rank.passes import Passes
from tests.compression.powersgd.ranks import error, exchange, gradients, matrix, same
from tests.grids import grid, only


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


@grid(dtype=[torch.float32, torch.float64], before__after=[(1, 4), (4, 1), (2, 2)], alternate=[False, True], cover=1)
def test_a_state_of_another_rank_takes_residuals_over(
    dtype: torch.dtype, before: int, after: int, alternate: bool
) -> None:
    """It goes on as a new one with these residuals does, in the memory of the old one."""
    shapes, names = [(20, 30), (8,), (8, 4, 3, 3), (20, 30)], ["a", "b", "c", "d"]
    old = PowerSGD(before, min_compression=0).start(shapes, names, dtype=dtype)
    for step in range(3):
        exchange([old], [gradients(shapes, step)])
    saved = old.state_dict()["residuals"]
    memory = {t.data_ptr() for s in old._stacks.each for t in (s.before, s.total)}
    config = PowerSGD(after, seed=5, min_compression=0, alternate=alternate)
    new, fresh = config.take_over(old), config.start(shapes, names, dtype=dtype)
    assert new is not None
    assert {t.data_ptr() for s in new._stacks.each for t in (s.before, s.total)} == memory
    found = new.state_dict()
    assert found["residuals"].keys() == {"a", "c", "d"}
    for name, residual in saved.items():
        assert residual.norm() > 0.1
        torch.testing.assert_close(found["residuals"][name], residual)
    fresh.load_state_dict({**fresh.state_dict(), "residuals": found["residuals"]})
    for step in range(3, 7):
        outs = []
        for state in (new, fresh):
            x = gradients(shapes, step)
            if isinstance(state, AlternatingLowRank):
                state.finish(state.factor(x), x)
            else:
                state.finish(state.right(state.left(x)), x)
            outs.append([x[i] for i in (0, 2, 3)])
        assert all(same(a, b) for a, b in zip(*outs, strict=True))


def test_residuals_in_another_unit() -> None:
    """The last output, which is still to be taken off, is in the unit of before."""
    state = PowerSGD(2, min_compression=0).start([(20, 30), (20, 30)])
    for step in range(2):
        exchange([state], [gradients([(20, 30), (20, 30)], step)])
    before = state.state_dict()["residuals"]
    state.scale(8.0)
    for name, residual in state.state_dict()["residuals"].items():
        assert same(residual, 8 * before[name])


def test_a_state_that_compresses_other_tensors_takes_nothing_over() -> None:
    shapes = [(20, 30), (6, 6)]
    old = PowerSGD(1).start(shapes)
    exchange([old], [gradients(shapes)])
    saved = old.state_dict()["residuals"]
    assert PowerSGD(2).take_over(old) is None
    assert all(same(residual, saved[name]) for name, residual in old.state_dict()["residuals"].items())


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"seed": -1}, "seed must be from 0"),
        ({"seed": 2**64}, "seed must be from 0"),
        ({"min_compression": -1.0}, "min_compression must be"),
        ({"min_compression": math.nan}, "min_compression of PowerSGD must be a finite number"),
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


@grid(rank=only([1, 2, 3, 4, 5], 1, 2, 4, 5), columns=[5, 48, 150, 304], cover=1)
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
