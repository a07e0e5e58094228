"""A step from PowerSGD's factors is their product, written to the gradients, and then a step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from bagua_kernels import optim
from bagua_kernels.compression import AlternatingLowRank, LowRank, PowerSGD
from bagua_kernels.optim.step.fused import Fused
from bagua_kernels.optim.step.part import Part
from tests.grids import grid, only

# Rows that fill what is made at a time in parts and many times over, and one task or several.
SHAPES = [(20, 30), (9,), (70, 600), (300, 130), (8, 4, 3, 3), (20, 30), (3, 40_000), (1000, 3)]
OPTIMIZERS: dict[str, Callable[..., Fused]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, maximize=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "two rules": lambda p: optim.SGD([{"params": p[:3], "momentum": 0.9}, {"params": p[3:]}], lr=0.1),
}


def parameters(shapes: Sequence[Sequence[int]] = SHAPES) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(tuple(shape), generator=generator)) for shape in shapes]


def gradients(step: int, shapes: Sequence[Sequence[int]] = SHAPES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    return [torch.randn(tuple(shape), generator=generator) for shape in shapes]


State = LowRank | AlternatingLowRank


def last_factor(state: State, given: list[torch.Tensor]) -> torch.Tensor:
    return state.right(state.left(given)) if isinstance(state, LowRank) else state.factor(given)


def of_products(state: State, optimizer: Fused, params: list[torch.nn.Parameter], given: list[torch.Tensor]) -> None:
    out = [torch.zeros(gradient.shape) for gradient in given]
    state.finish(last_factor(state, given), out)
    for i, (p, gradient) in enumerate(zip(params, out, strict=True)):
        p.grad = None if i in state.dense else gradient
    optimizer.step()


def of_factors(state: State, part: Part, params: list[torch.nn.Parameter], given: list[torch.Tensor]) -> None:
    places = [i for i in range(len(params)) if i not in state.dense]
    for i in places:
        params[i].grad = torch.full_like(params[i], math.nan)  # is not read
    with part.from_factors() as updates:
        assert updates is not None
        state.finish_with_updates(last_factor(state, given), dict(zip(places, updates, strict=True)))


@grid(
    name=list(OPTIMIZERS),
    # Each rank compiles a pass with each optimizer's rules.
    rank__threads__options=only(
        [
            (1, 1, {}),
            (2, 2, {}),
            (3, 2, {"warm_start": False}),
            (4, 1, {}),
            (2, 1, {"alternate": True}),
        ],
        (2, 2, {}),
        (2, 1, {"alternate": True}),
    ),
    cover=1,
)
def test_bits_are_those_of_a_step_from_products(name: str, rank: int, threads: int, options: dict[str, bool]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        mine, other = parameters(), parameters()
        first, second = OPTIMIZERS[name](mine), OPTIMIZERS[name](other)
        direct, plain = (PowerSGD(rank, **options).start(SHAPES) for _ in range(2))
        part = Part(first, [p for i, p in enumerate(mine) if i not in direct.dense])
        for step in range(4):
            given = gradients(step)
            if step == 2:
                # Of one matrix nothing is kept, and another's sums overflow; those beside them do not care.
                given[0][3, 4] = math.inf
                given[3][0, 0] = 3e38
            of_factors(direct, part, mine, given)
            of_products(plain, second, other, given)
            for group in (*first.param_groups, *second.param_groups):
                group["lr"] *= 0.7
            assert_same(direct, plain)
        for p, q in zip(mine, other, strict=True):
            assert torch.equal(p.nan_to_num(7.0), q.nan_to_num(7.0))
            assert first.state[p].keys() == second.state[q].keys()
            for key, value in second.state[q].items():
                assert torch.equal(
                    torch.as_tensor(first.state[p][key]).nan_to_num(7.0), torch.as_tensor(value).nan_to_num(7.0)
                )
        assert not mine[0].isfinite().all()
        assert mine[5].isfinite().all()
        assert not torch.equal(mine[5], parameters()[5])
        assert torch.equal(mine[1], parameters()[1])
    finally:
        torch.set_num_threads(before)


def assert_same(direct: State, plain: State) -> None:
    ours, theirs = direct.state_dict(), plain.state_dict()
    assert ours.pop("step") == theirs.pop("step")
    assert ours.keys() == theirs.keys()
    for what in theirs:
        for key, value in theirs[what].items():
            assert torch.equal(ours[what][key], value), (what, key)


def test_either_may_follow_the_other() -> None:
    mine, other = parameters(), parameters()
    first, second = optim.AdamW(mine, lr=0.01), optim.AdamW(other, lr=0.01)
    mixed, plain = PowerSGD(2).start(SHAPES), PowerSGD(2).start(SHAPES)
    part = Part(first, [p for i, p in enumerate(mine) if i not in mixed.dense])
    for step, with_factors in enumerate((True, False, True, True, False)):
        if with_factors:
            of_factors(mixed, part, mine, gradients(step))
        else:
            of_products(mixed, first, mine, gradients(step))
        of_products(plain, second, other, gradients(step))
        assert_same(mixed, plain)
        if step == 2:
            # Parameters and states lie elsewhere from now on.
            first.load_state_dict(copy.deepcopy(first.state_dict()))
            for p in mine:
                p.data = p.data.clone()
    assert all(map(torch.equal, mine, other))


def test_a_gradient_of_another_dtype_is_no_hindrance() -> None:
    """The passes leave such matrices to PyTorch; the update takes all."""
    mine, other = parameters(), parameters()
    first, second = optim.SGD(mine, lr=0.1), optim.SGD(other, lr=0.1)
    direct, plain = PowerSGD(2).start(SHAPES), PowerSGD(2).start(SHAPES)
    part = Part(first, [p for i, p in enumerate(mine) if i not in direct.dense])
    for step in range(3):
        given = gradients(step)
        given[2] = given[2].to(torch.bfloat16)
        of_factors(direct, part, mine, given)
        of_products(plain, second, other, given)
    assert all(map(torch.equal, mine, other))


def test_a_parameter_elsewhere_in_memory_is_left_to_a_step() -> None:
    p = torch.nn.Parameter(torch.ones(4, 5, 2, 2).to(memory_format=torch.channels_last))
    p.grad = torch.ones_like(p)
    with Part(optim.AdamW([p]), [p]).from_factors() as updates:
        assert updates is None
    moved = torch.nn.Parameter(torch.ones(8, 6))
    optimizer = optim.SGD([moved], lr=0.1, momentum=0.9)
    moved.grad = torch.ones_like(moved)
    optimizer.step()
    optimizer.state[moved]["momentum_buffer"] = torch.ones(6, 8).t()
    with Part(optimizer, [moved]).from_factors() as updates:
        assert updates is None
    whole = [torch.nn.Parameter(torch.ones(8, 8))]
    whole[0].grad = torch.ones(8, 8)
    for make in (lambda q: optim.LAMB(q), lambda q: optim.AdamW(q, extras=optim.Extras(average=0.9))):
        optimizer = make(whole)
        with Part(optimizer, whole).from_factors() as updates:
            assert updates is None
        assert torch.equal(whole[0], torch.ones(8, 8))


def test_refusals() -> None:
    state = PowerSGD(1).start([(8, 8), (9, 9)])
    params = parameters([(8, 8), (9, 9)])
    for p in params:
        p.grad = torch.ones_like(p)
    with Part(optim.SGD(params, lr=0.1), params).from_factors() as found:
        assert found is not None
        with pytest.raises(RuntimeError, match="call `left` next"):
            state.finish_with_updates(state._stacks.right, {0: found[0], 1: found[1]})
        right = state.right(state.left(gradients(0, [(8, 8), (9, 9)])))
        with pytest.raises(ValueError, match=r"81 float32 elements .* tensor 1 .*got None"):
            state.finish_with_updates(right, {0: found[0]})
        with pytest.raises(ValueError, match=r"64 float32 elements .* tensor 0 "):
            state.finish_with_updates(right, {0: found[1], 1: found[0]})
        random = found[0]._replace(variant=replace(found[0].variant, dtypes=(torch.bfloat16,) * 2, stochastic=True))
        with pytest.raises(ValueError, match="by an elementwise rule for tensor 0 "):
            state.finish_with_updates(right, {0: random, 1: found[1]})
        with pytest.raises(ValueError, match="expected factors of shape"):
            state.finish_with_updates(right[1:], {0: found[0], 1: found[1]})
        assert state.step == 0
        state.finish_with_updates(right, {0: found[0], 1: found[1]})
        assert state.step == 1
        double = PowerSGD(1).start([(8, 8)], dtype=torch.float64)
        assert not double.updates
        right = double.right(double.left([torch.ones(8, 8, dtype=torch.float64)]))
        with pytest.raises(RuntimeError, match="float32 on the CPU"):
            double.finish_with_updates(right, {0: found[0]})
