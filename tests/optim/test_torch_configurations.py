"""PyTorch's own table of optimizer configurations and of bad arguments, run over ours."""

from __future__ import annotations

import copy
import functools
import inspect
import io
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import Parameter

from tests.grids import grid, noted
from tests.optim import pairs

READ_WITH = "2.13"


class Table(NamedTuple):
    """What PyTorch tests its optimizers with, by their names.

    Attributes:
        module: the table itself.
        info: what an optimizer supports.
        inputs: arguments.
        errors: bad arguments and steps.
    """

    module: ModuleType
    info: dict[str, Any]
    inputs: dict[str, list[Any]]
    errors: dict[str, list[Any]]


@functools.cache
def table() -> Table:
    """Reads the table, which imports for seconds, so that a process that runs no test of this file does not."""
    try:
        module = pairs.torchs_table()
        with torch.random.fork_rng(devices=[]):
            info = {info.name: info for info in module.optim_db if info.name in pairs.NAMES}
            inputs = {name: each.optim_inputs_func(device="cpu") for name, each in info.items()}
            errors = {name: each.optim_error_inputs_func("cpu", torch.float32) for name, each in info.items()}
    except (ImportError, AttributeError, TypeError) as problem:
        if torch.__version__.startswith(READ_WITH):
            raise
        pytest.skip(f"torch {torch.__version__} has another table than {READ_WITH}: {problem}")
    return Table(module, info, inputs, errors)


TENSOR_RATE = {"lr": torch.tensor(0.01)}
TENSOR_BETAS = {"betas": (torch.tensor(0.8), torch.tensor(0.99))}
EXTRA: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9, "nesterov": True, "maximize": True}],
    "Adam": [TENSOR_BETAS, TENSOR_BETAS | TENSOR_RATE, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "AdamW": [TENSOR_BETAS, TENSOR_BETAS | TENSOR_RATE],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1, "maximize": True}],
    "Muon": [{"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}],
}


def configurations(name: str) -> list[tuple[str, dict[str, Any]]]:
    """The entries of an optimizer in the table, and some more, each with a description."""
    listed = [(entry.desc, entry.kwargs) for entry in table().inputs[name]]
    added = [("many terms", pairs.ARGUMENTS[name]), ("lr in a tensor", TENSOR_RATE)]
    return listed + added + [("+".join(kwargs), kwargs) for kwargs in EXTRA.get(name, [])]


def with_flags(name: str, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Arguments as they are, and with each of the flags that choose an implementation."""
    yield arguments
    for flag in pairs.implementations(name):
        yield arguments | {flag: True}


every_optimizer = grid(cover=1, name=pairs.NAMES)


def in_double(arguments: Any) -> Any:
    """A learning rate or beta of four bytes has PyTorch compute with four bytes here and with eight there."""
    if isinstance(arguments, dict):
        return {key: in_double(value) for key, value in arguments.items()}
    if isinstance(arguments, tuple):
        return tuple(map(in_double, arguments))
    return arguments.double() if isinstance(arguments, torch.Tensor) else arguments


@grid(name=pairs.NAMES)
def test_same_results_or_same_refusal(name: str) -> None:
    """With all terms of the update, and with none but those of the defaults."""
    for arguments in ({}, pairs.ARGUMENTS[name]):
        for given in with_flags(name, arguments):
            with noted(repr(given)):
                check_results(name, given, torch.float32)


@pytest.mark.slow
@grid(name=pairs.NAMES)
def test_same_results_or_same_refusal_of_all(name: str) -> None:
    for _, arguments in configurations(name):
        for given in with_flags(name, arguments):
            with noted(repr(given)):
                check_results(name, given, torch.float32)


@grid(name=["SGD", "AdamW", "Rprop"], dtype=[torch.float64, torch.complex64], cover=1)
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    for _, arguments in configurations(name):
        for given in with_flags(name, arguments):
            with noted(repr(given)):
                check_results(name, given, dtype)


def check_results(name: str, arguments: dict[str, Any], dtype: torch.dtype) -> None:
    if dtype == torch.float64:
        arguments = in_double(arguments)
    refusal = pairs.outcome(pairs.theirs(name), pairs.parameters(name, dtype), arguments)
    assert pairs.outcome(pairs.ours(name), pairs.parameters(name, dtype), arguments) == refusal
    if refusal is not None:
        assert dtype.is_complex or "as a Tensor is not supported" in refusal[2]
        return
    pair = pairs.pair(name, arguments, dtype)
    pair.train(range(4))
    pair.assert_same()
    asked = pairs.theirs(name)(pairs.parameters(name, dtype), **arguments)
    assert pair.ours.defaults == asked.defaults
    for mine, expected in zip(pair.ours.param_groups, asked.param_groups, strict=True):
        assert list(mine) == list(expected)
        assert {key: mine[key] for key in mine if key != "params"} == {
            key: expected[key] for key in expected if key != "params"
        }


@grid(name=pairs.NAMES)
def test_errors(name: str) -> None:
    for entry in table().errors[name]:
        with noted(entry.optimizer_error_input.desc):
            check_error(name, entry)


def check_error(name: str, entry: Any) -> None:
    given = entry.optimizer_error_input
    wanted = [Parameter(torch.randn(2, 3))] if given.params is None else given.params
    build = functools.partial(pairs.ours(name), wanted, **given.kwargs)
    if entry.error_type is UserWarning:
        with pytest.warns(UserWarning, match=entry.error_regex):
            build()
    elif entry.error_on is table().module.OptimizerErrorEnum.CONSTRUCTION_ERROR:
        with pytest.raises(entry.error_type, match=entry.error_regex):
            build()
    else:
        optimizer = build()
        for parameter in wanted:
            parameter.grad = torch.ones_like(parameter) if parameter.grad is None else parameter.grad
        with pytest.raises(entry.error_type, match=entry.error_regex):
            optimizer.step()


@every_optimizer
def test_older_checkpoints(name: str) -> None:
    for description, arguments in configurations(name):
        with noted(description):
            check_older_checkpoint(name, arguments)


def check_older_checkpoint(name: str, arguments: dict[str, Any]) -> None:
    """Saved before there were flags, when steps were counted with numbers."""
    pair = pairs.pair(name, arguments)
    pair.train(range(2))
    for optimizer in pair:
        saved = copy.deepcopy(optimizer.state_dict())
        for group in saved["param_groups"]:
            for flag in {*table().info[name].not_og_supported_flags, "differentiable", "fused"} & set(group):
                if not group[flag]:
                    del group[flag]
        for kept in saved["state"].values():
            if "step" in kept:
                kept["step"] = float(kept["step"])
        optimizer.load_state_dict(saved)
    pair.train(range(2, 4))
    pair.assert_same()
    assert [set(group) for group in pair.ours.param_groups] == [set(group) for group in pair.theirs.param_groups]


@every_optimizer
def test_saved_and_loaded_with_weights_only(name: str) -> None:
    for _, arguments in configurations(name):
        for given in with_flags(name, arguments):
            with noted(repr(given)):
                check_saved(name, given)


def check_saved(name: str, arguments: dict[str, Any]) -> None:
    if pairs.outcome(pairs.theirs(name), pairs.parameters(name), arguments) is not None:
        return  # refused, as another test checks
    optimizer = pairs.ours(name)(pairs.parameters(name), **copy.deepcopy(arguments))
    pairs.train(optimizer, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = pairs.ours(name)([p.detach().clone() for p in pairs.parameters_of(optimizer)], **arguments)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    resumed = pairs.Pair(loaded, optimizer)
    resumed.assert_same(rtol=0, atol=0)
    resumed.train(range(2, 4))
    resumed.assert_same(rtol=0, atol=0)


@every_optimizer
def test_differentiable(name: str) -> None:
    """Derivatives of a step, with respect to the parameter before and to the gradient."""
    if "differentiable" not in table().info[name].supported_impls:
        assert "differentiable" not in inspect.signature(pairs.ours(name)).parameters
        return
    for description, arguments in configurations(name):
        with noted(description):
            check_derivatives(name, arguments)


def check_derivatives(name: str, arguments: dict[str, Any]) -> None:
    def derivatives(kind: type[torch.optim.Optimizer]) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        start, gradient = torch.randn(2, 2, 3, dtype=torch.float64, generator=generator).unbind()
        sources = (start.requires_grad_(), gradient.requires_grad_())
        parameter = start.clone()
        optimizer = kind([parameter], **in_double(copy.deepcopy(arguments)), differentiable=True)
        parameter.grad = gradient
        optimizer.step()
        return torch.autograd.grad(parameter.square().sum(), sources, materialize_grads=True)

    wanted = derivatives(pairs.theirs(name))
    assert wanted[0].count_nonzero()
    torch.testing.assert_close(derivatives(pairs.ours(name)), wanted, rtol=1e-12, atol=1e-12)
