"""What users of `torch.optim` rely on beside the numbers: groups, closures, versions, hooks."""

from __future__ import annotations

import copy
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests import limits
from tests.grids import grid
from tests.optim import pairs

every_optimizer = grid(cover=1, name=pairs.NAMES)
IMPLEMENTATIONS = {
    f"{name}-{flag or 'default'}": (name, {flag: True} if flag else {})
    for name in pairs.NAMES
    for flag in [None, *pairs.implementations(name)]
}
every_implementation = grid(cover=1, name__flags=IMPLEMENTATIONS)


def build(name: str, **flags: Any) -> Optimizer:
    return pairs.ours(name)(pairs.parameters(name), **pairs.ARGUMENTS[name], **flags)


@every_optimizer
def test_is_the_class_of_torch_with_its_constructor(name: str) -> None:
    assert issubclass(pairs.ours(name), pairs.theirs(name))
    assert pairs.ours(name).__name__ == name
    mine, expected = (
        [(p.name, p.kind, p.default) for p in inspect.signature(kind).parameters.values()]
        for kind in (pairs.ours(name), pairs.theirs(name))
    )
    assert mine[: len(expected)] == expected


@every_optimizer
def test_groups_have_their_own_arguments(name: str) -> None:
    def groups(parameters: list[Parameter]) -> list[dict[str, Any]]:
        variations: list[dict[str, Any]] = [{}, {"lr": 0.5}, {"weight_decay": 0.3}, {"lr": 0.01, "maximize": True}]
        known = inspect.signature(pairs.theirs(name)).parameters
        return [
            {"params": [parameter]} | {key: value for key, value in variation.items() if key in known}
            for parameter, variation in zip((p for p in parameters if p.numel()), variations, strict=True)
        ]

    arguments = pairs.ARGUMENTS[name]
    pair = pairs.Pair(
        pairs.ours(name)(groups(pairs.parameters(name)), **arguments),
        pairs.theirs(name)(groups(pairs.parameters(name)), **pairs.plain(name, arguments)),
    )
    pair.train(range(2))
    for optimizer in pair:
        late = Parameter(torch.ones(2, 2))
        optimizer.add_param_group({"params": [late], "lr": 0.3})
        optimizer.param_groups[0]["lr"] = 0.2
    pair.train(range(2, 4))
    pair.assert_same()
    assert all(pair.ours.state[pair.ours.param_groups[-1]["params"][0]])


@grid(name=pairs.NAMES, dtype=[torch.float32, torch.float64], shape=[(), (1,), (1, 1)], cover=1)
def test_learning_rates_in_tensors(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """They may be changed in place, as schedulers do."""
    pair = pairs.pair(name, pairs.ARGUMENTS[name] | {"lr": torch.full(shape, 0.05)}, dtype)
    pair.train(range(2))
    for optimizer in pair:
        optimizer.param_groups[0]["lr"].fill_(0.4)
    pair.train(range(2, 4))
    pair.assert_same(**pairs.TOLERANCES[torch.float32])
    assert pair.ours.param_groups[0]["lr"].shape == shape


@every_implementation
def test_closure(name: str, flags: dict[str, Any]) -> None:
    """It is called once, may compute gradients though the step does not, and its value comes back."""
    optimizer = build(name, **flags)
    before = [p.detach().clone() for p in pairs.parameters_of(optimizer)]
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in pairs.parameters_of(optimizer))
        loss.backward()
        return loss

    with torch.no_grad():
        value = optimizer.step(closure)
    assert calls == [True]
    assert float(value.detach()) == pytest.approx(float(sum(p.square().sum() for p in before)))
    after = list(pairs.parameters_of(optimizer))
    assert all(not torch.equal(p, q) for p, q in zip(before, after, strict=True) if p.numel())
    assert optimizer.step() is None


@every_implementation
def test_parameters_without_gradient_are_left_alone(name: str, flags: dict[str, Any]) -> None:
    pair = pairs.pair(name, pairs.ARGUMENTS[name] | flags)
    for optimizer in pair:
        for parameter in pairs.parameters_of(optimizer):
            parameter.grad = None
        optimizer.step()
    pair.assert_same()
    skipped = list(pairs.parameters_of(pair.ours))[3]
    before, version = skipped.detach().clone(), skipped._version
    for step in range(3):
        for optimizer in pair:
            for index, parameter in enumerate(pairs.parameters_of(optimizer)):
                parameter.grad = None if index == 3 else pairs.gradient(parameter, 10 * step + index)
            optimizer.step()
    assert torch.equal(skipped, before)
    assert skipped._version == version
    if name != "Adagrad":
        assert not pair.ours.state.get(skipped)
    pair.assert_same()
    pair.train(range(2))  # the one that was skipped begins, the others go on
    pair.assert_same()


@grid(maximize={"minimize": False, "maximize": True}, name__flags=IMPLEMENTATIONS, cover=1)
def test_gradients_are_not_written(name: str, flags: dict[str, Any], maximize: bool) -> None:
    if name == "Muon" and maximize:
        assert "maximize" not in inspect.signature(pairs.ours(name)).parameters
        return
    optimizer = build(name, **flags, **({"maximize": True} if maximize else {}))
    for step in range(2):
        gradients = [pairs.gradient(p, step) for p in pairs.parameters_of(optimizer)]
        for parameter, gradient in zip(pairs.parameters_of(optimizer), gradients, strict=True):
            parameter.grad = gradient
        copies, versions = [g.clone() for g in gradients], [g._version for g in gradients]
        optimizer.step()
        assert [g._version for g in gradients] == versions
        for parameter, gradient, before in zip(pairs.parameters_of(optimizer), gradients, copies, strict=True):
            assert parameter.grad is gradient
            assert torch.equal(gradient, before)


@grid(dtype=[torch.float32, torch.complex64], name__flags=IMPLEMENTATIONS, cover=1)
def test_autograd_sees_the_step(name: str, flags: dict[str, Any], dtype: torch.dtype) -> None:
    """Backward through a product computed before the step would use the values after it."""
    if dtype.is_complex and (name == "Muon" or flags.get("fused")):
        return  # refused, as another test checks
    optimizer = pairs.ours(name)(pairs.parameters(name, dtype), **pairs.ARGUMENTS[name], **flags)
    for step in range(2):
        before = [(p * p).abs().sum() for p in pairs.parameters_of(optimizer) if p.numel()]
        pairs.train(optimizer, [step])
        for loss in before:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@every_implementation
def test_zero_grad(name: str, flags: dict[str, Any]) -> None:
    optimizer = build(name, **flags)
    pairs.train(optimizer, [0])
    gradients = [p.grad for p in pairs.parameters_of(optimizer)]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is g and not g.any() for p, g in zip(pairs.parameters_of(optimizer), gradients, strict=True))
    optimizer.zero_grad()
    assert all(p.grad is None for p in pairs.parameters_of(optimizer))


# Three of which torch's fused kernels have the results wrong; test_memory_layouts.py has all others.
LAYOUTS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "transposed gradient": lambda: (torch.randn(5, 7), torch.randn(7, 5).t()),
    "expanded gradient": lambda: (torch.randn(5, 7), torch.randn(()).expand(5, 7)),
    "parameter with gaps": lambda: (torch.randn(10, 14)[::2, 1::2], torch.randn(5, 7)),
}


@grid(layout=list(LAYOUTS), name__flags=IMPLEMENTATIONS, cover=1)
def test_layouts_in_memory(name: str, flags: dict[str, Any], layout: str) -> None:
    """Elements that belong together meet, and nothing beside the parameter is written."""
    torch.manual_seed(0)
    value, gradient = LAYOUTS[layout]()
    mine, other = value.detach().requires_grad_(), Parameter(value.clone())
    memory = torch.empty(0).set_(value.untyped_storage())
    expected = memory.clone()
    arguments = pairs.ARGUMENTS[name]
    pair = pairs.Pair(
        pairs.ours(name)([mine], **arguments, **flags), pairs.theirs(name)([other], **pairs.plain(name, arguments))
    )
    for _ in range(3):
        mine.grad, other.grad = gradient, gradient.clone()
        for optimizer in pair:
            optimizer.step()
    torch.testing.assert_close(mine, other, **pairs.TOLERANCES[torch.float32])
    expected.as_strided(value.shape, value.stride(), value.storage_offset()).copy_(mine.detach())
    assert torch.equal(memory, expected)


@every_optimizer
def test_conjugated_gradients(name: str) -> None:
    """They are either conjugated or refused, as by torch, where a conjugate is only a mark on a tensor."""
    if name == "Muon":
        return  # refuses complex parameters, as another test checks
    pair = pairs.pair(name, dtype=torch.complex64)
    for optimizer in pair:
        for index, parameter in enumerate(pairs.parameters_of(optimizer)):
            parameter.grad = pairs.gradient(parameter, index).conj()
            if optimizer is pair.theirs:
                parameter.grad = parameter.grad.resolve_conj()
    pair.theirs.step()
    refusal = ""
    try:
        pair.ours.step()
    except RuntimeError as error:
        refusal = str(error)
    if not refusal:
        pair.assert_same()
    else:
        assert "conjugate" in refusal


class Log(list[str]):
    """Registers every kind of hook on an optimizer and notes when each is called."""

    def attach(self, optimizer: Optimizer) -> list[Any]:
        kinds = ("step_pre", "step_post", "state_dict_pre", "state_dict_post")
        kinds += ("load_state_dict_pre", "load_state_dict_post")
        handles = [
            getattr(optimizer, f"register_{kind}_hook")(lambda *_, kind=kind: self.append(kind)) for kind in kinds
        ]
        handles.append(register_optimizer_step_pre_hook(lambda *_: self.append("global_pre")))
        handles.append(register_optimizer_step_post_hook(lambda *_: self.append("global_post")))
        return handles


@grid(derived={"itself": False, "derived": True}, name__flags=IMPLEMENTATIONS, cover=1)
def test_hooks_run_once_and_in_order(name: str, flags: dict[str, Any], derived: bool) -> None:
    pairs.theirs(name)(pairs.parameters(name))  # which wraps the step of the class when it is first made
    kind = type("Derived", (pairs.ours(name),), {}) if derived else pairs.ours(name)
    optimizer = kind(pairs.parameters(name), **pairs.ARGUMENTS[name], **flags)
    log = Log()
    handles = log.attach(optimizer)
    try:
        optimizer.step(lambda: log.append("closure"))
        assert log == ["global_pre", "step_pre", "closure", "step_post", "global_post"]
        log.clear()
        optimizer.load_state_dict(optimizer.state_dict())
        assert log == ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]
    finally:
        for handle in handles:
            handle.remove()
    log.clear()
    pairs.train(optimizer, [0])
    assert log == []
    optimizer.register_step_pre_hook(lambda self, args, kwargs: ((self, lambda: "of the hook"), {}))
    assert optimizer.step() == "of the hook"


BEFORE_TORCH = """
import json, sys
from tests.optim import pairs

counts = {}
for name in sys.argv[1:]:
    optimizer = pairs.ours(name)(pairs.parameters(name))
    calls = counts[name] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.step()
    pairs.theirs(name)(pairs.parameters(name)).step()
    optimizer.step()
json.dump(counts, sys.stdout)
"""


@pytest.mark.slow
def test_hooks_run_once_where_torchs_classes_come_later() -> None:
    command = [sys.executable, "-c", BEFORE_TORCH, *pairs.NAMES]
    root = Path(__file__).parents[2]
    finished = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=limits.seconds(100), check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == {name: ["pre", "post"] * 2 for name in pairs.NAMES}


@every_optimizer
def test_states_from_pickles_without_todays_arguments(name: str) -> None:
    """`__setstate__` fills in what groups lack, and the default arguments with it."""
    restored = []
    for optimizer in pairs.pair(name):
        pairs.train(optimizer, [0])
        kept = copy.deepcopy(optimizer.__getstate__())
        for group in kept["param_groups"]:
            for key in {"maximize", "foreach", "capturable", "differentiable", "fused"} & set(group):
                del group[key]
        kept["defaults"].pop("differentiable", None)
        new = type(optimizer).__new__(type(optimizer))
        new.__setstate__(kept)
        pairs.train(new, range(1, 3))
        restored.append(new)
    mine, expected = restored
    pairs.Pair(mine, expected).assert_same()
    assert mine.defaults.keys() == expected.defaults.keys()
    assert [set(group) for group in mine.param_groups] == [set(group) for group in expected.param_groups]
