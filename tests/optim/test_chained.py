"""Several optimizers as one: what each of them does by itself, and what loops expect of one optimizer."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.optim import ChainedOptimizer
from tests.grids import grid

LIBRARIES = {"torch": torch.optim, "own": optim}
every_library = grid(cover=1, library=LIBRARIES)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def parts(model: nn.Module, library: Any) -> list[torch.optim.Optimizer]:
    """Momentum for the first layer in two groups, Adam for the last."""
    first, last = model[0], model[2]
    groups = [{"params": [first.weight]}, {"params": [first.bias], "lr": 0.03}]
    return [library.SGD(groups, lr=0.1, momentum=0.9), library.AdamW(last.parameters(), lr=0.01)]


def train(model: nn.Module, optimizers: list[Any], steps: range, after: Callable[[], object] = lambda: None) -> None:
    for step in steps:
        torch.manual_seed(100 + step)
        x = torch.randn(4, 5)
        for each in optimizers:
            each.zero_grad()
        model(x).square().mean().backward()
        for each in optimizers:
            each.step()
        after()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@every_library
def test_steps_are_those_of_the_optimizers(library: Any) -> None:
    one, apart = net(), net()
    train(one, [ChainedOptimizer(*parts(one, library))], range(5))
    train(apart, parts(apart, library), range(5))
    assert same(one, apart)
    assert not same(one, net())


@every_library
def test_a_scheduler_reaches_all_of_them(library: Any) -> None:
    one, apart = net(), net()
    chain, optimizers = ChainedOptimizer(*parts(one, library)), parts(apart, library)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (chain, *optimizers)]
    train(one, [chain], range(4), schedulers[0].step)
    train(apart, optimizers, range(4), lambda: [each.step() for each in schedulers[1:]])
    assert same(one, apart)
    assert [group["lr"] for group in chain.param_groups] == pytest.approx([0.1 / 16, 0.03 / 16, 0.01 / 16])


@every_library
def test_states_go_through_a_file(library: Any) -> None:
    """The state is that of one optimizer with all groups: it also goes into a new chain, and into a copy."""
    model = net()
    chain = ChainedOptimizer(*parts(model, library))
    train(model, [chain], range(3))
    state = chain.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [[0], [1], [2, 3]]
    assert set(state["state"]) == {0, 1, 2, 3}
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": state}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    again = net(1)
    other = ChainedOptimizer(*parts(again, library))
    again.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["optimizer"])
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (chain, other)]
    train(model, [chain], range(3, 6), schedulers[0].step)
    train(again, [other], range(3, 6), schedulers[1].step)
    assert same(model, again)


@every_library
def test_copies_have_optimizers_of_their_own(library: Any) -> None:
    model = net()
    chain = ChainedOptimizer(*parts(model, library))
    train(model, [chain], range(2))
    copied, other = copy.deepcopy((model, chain))
    train(model, [chain], range(2, 4))
    assert not same(model, copied)
    train(copied, [other], range(2, 4))
    assert same(model, copied)


def test_a_closure_is_called_once() -> None:
    model = net()
    chain = ChainedOptimizer(*parts(model, torch.optim))
    calls = []

    def closure() -> torch.Tensor:
        chain.zero_grad()
        loss = model(torch.ones(2, 5)).square().mean()
        loss.backward()
        calls.append(loss.item())
        return loss

    before = copy.deepcopy(model)
    assert chain.step(closure).item() == calls[0]
    assert len(calls) == 1
    assert not same(before, model)


@grid(cover=1, overflow=[False, True])
@every_library
def test_a_gradient_scaler_leaves_out_the_whole_step(library: Any, overflow: bool) -> None:
    model, apart = net(), net()
    chain = ChainedOptimizer(*parts(model, library))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.ones(2, 5)
    scaler.scale(model(x).square().mean()).backward()
    if overflow:
        model[2].bias.grad[0] = float("inf")
    scaler.step(chain)
    scaler.update()
    if not overflow:
        optimizers = parts(apart, library)
        apart(x).square().mean().backward()
        for each in optimizers:
            each.step()
    for ours, theirs in zip(model.parameters(), apart.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_hooks_are_called_once() -> None:
    model, seen = net(), []
    chain = ChainedOptimizer(*parts(model, torch.optim))
    chain.register_step_pre_hook(lambda *_: seen.append("before"))
    chain.register_step_post_hook(lambda *_: seen.append("after"))
    train(model, [chain], range(1))
    assert seen == ["before", "after"]


def test_what_is_refused() -> None:
    model = net()
    sgd, adam = parts(model, torch.optim)
    with pytest.raises(ValueError, match="expected one optimizer or more"):
        ChainedOptimizer()
    with pytest.raises(TypeError, match="expected optimizers, got 3"):
        ChainedOptimizer(sgd, 3)
    with pytest.raises(ValueError, match="more than one parameter group"):
        ChainedOptimizer(sgd, torch.optim.SGD(model[0].parameters(), lr=0.1))
    chain = ChainedOptimizer(sgd, adam)
    with pytest.raises(TypeError, match="give them to one of its optimizers"):
        chain.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ValueError, match="the state has 2 groups of parameters, expected 3"):
        chain.load_state_dict(sgd.state_dict())


RESETS: dict[str, Callable[[Any, Any], object]] = {
    "assign": lambda chain, params: setattr(chain, "state", defaultdict(dict)),
    "clear": lambda chain, params: chain.state.clear(),
    "delete": lambda chain, params: [chain.state.__delitem__(p) for p in params],
    "pop": lambda chain, params: [chain.state.pop(p) for p in params],
    "popitem": lambda chain, params: [chain.state.popitem() for _ in params],
    "empty each": lambda chain, params: [chain.state[p].clear() for p in params],
    "replace each": lambda chain, params: chain.state.update({p: {} for p in params}),
    "members": lambda chain, params: [setattr(each, "state", defaultdict(dict)) for each in chain.optimizers],
}


@grid(cover=1, reset=RESETS)
@every_library
def test_a_reset_of_the_state_arrives(library: Any, reset: Callable[[Any, Any], object]) -> None:
    model = net()
    chain = ChainedOptimizer(*parts(model, library))
    train(model, [chain], range(3))
    assert len(chain.state) == 4
    fresh = copy.deepcopy(model)
    reset(chain, list(model.parameters()))
    assert not any(state for each in chain.optimizers for state in each.state.values())
    train(model, [chain], range(3, 5))
    train(fresh, parts(fresh, library), range(3, 5))
    assert same(model, fresh)


def test_states_are_those_of_the_optimizers() -> None:
    model = net()
    sgd, adam = parts(model, torch.optim)
    chain = ChainedOptimizer(sgd, adam)
    weight, bias = model[2].weight, model[0].bias
    held = chain.state
    assert weight not in held
    assert held.get(weight) is None
    assert len(held) == 0
    chain.state[weight] = {"step": torch.tensor(3.0)}
    chain.state[bias]["momentum_buffer"] = torch.ones(7)
    assert adam.state[weight]["step"] == 3
    assert set(sgd.state) == {bias}
    assert set(held) == {bias, weight}
    chain.state = {bias: {"momentum_buffer": None}}
    assert dict(sgd.state) == {bias: {"momentum_buffer": None}}
    assert not adam.state
    chain.state = chain.state
    assert dict(held) == {bias: {"momentum_buffer": None}}
    assert chain.state.pop(weight, None) is None
    chain.state["of no parameter"] = 5
    other = ChainedOptimizer(*parts(model, torch.optim))
    other.load_state_dict(chain.state_dict())
    assert other.state["of no parameter"] == 5


def test_groups_are_those_of_the_optimizers() -> None:
    model = net()
    sgd, adam = parts(model, torch.optim)
    chain = ChainedOptimizer(sgd, adam)
    held = chain.param_groups
    extra = nn.Parameter(torch.ones(2))
    sgd.add_param_group({"params": [extra], "lr": 0.5})
    assert [group["lr"] for group in held] == [0.1, 0.03, 0.5, 0.01]
    extra.grad = torch.ones(2)
    chain.step()
    assert extra.tolist() == [0.5, 0.5]
    chain.zero_grad()
    assert extra.grad is None
    adam.load_state_dict(adam.state_dict())
    torch.optim.lr_scheduler.LambdaLR(chain, lambda step: 0.5)
    assert adam.param_groups[0]["lr"] == 0.005
    chain.param_groups = [{**group, "lr": 1.0 + number} for number, group in enumerate(held)]
    assert [group["lr"] for group in (*sgd.param_groups, *adam.param_groups)] == [1.0, 2.0, 3.0, 4.0]
    chain.param_groups[-1] = {**held[-1], "lr": 5.0}
    assert adam.param_groups[0]["lr"] == 5.0
    del chain.param_groups[2]
    assert len(sgd.param_groups) == 2
    assert list(held) == sgd.param_groups + adam.param_groups == held
    with pytest.raises(TypeError, match="give them to one of its optimizers"):
        chain.param_groups.append({"params": [extra]})
    with pytest.raises(ValueError, match="a chain of 3 groups got 2"):
        chain.param_groups = list(held)[:2]


def test_gradients_are_forgotten_with_their_clipping() -> None:
    """As by each optimizer itself."""
    model, apart = net(), net()
    chain = ChainedOptimizer(*parts(model, optim))
    model(torch.ones(2, 5)).square().mean().backward()
    chain.optimizers[0].clip_grad_norm_(1e-3)
    train(model, [chain], range(1))
    train(apart, parts(apart, optim), range(1))
    assert same(model, apart)
