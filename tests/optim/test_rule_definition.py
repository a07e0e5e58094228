"""Optimizers made of rules: what may be given, and what is refused."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bagua_kernels.optim import rule_optimizer
from tests.optim.rules import (
    Halving,
    Heavy,
    HeavyChild,
    HeavyOracle,
    Plain,
    heavy,
    one,
    parameters,
    plain,
    shrunk,
    train,
)

FACTOR = 0.5

OPTIONS = ("lr", "momentum", "maximize")


class TestDefinition:
    def test_unknown_scalars_are_named_with_what_there_is(self) -> None:
        with pytest.raises(TypeError, match=r"'heavy' takes 'momentum', which is no option .*\blr\b"):
            rule_optimizer("No", heavy, state={"velocity": 0.0}, defaults={"lr": 0.1})
        with pytest.raises(TypeError, match="'correction'"):
            rule_optimizer("No", heavy, state={"velocity": 0.0}, defaults={"lr": 0.1, "momentum": 0.9})

    def test_too_few_arguments(self) -> None:
        states = {"a": 0.0, "b": 0.0}
        with pytest.raises(TypeError, match=r"'plain' must take a parameter, a gradient and 2 states, got \['p'"):
            rule_optimizer("No", plain, state=states, defaults={"lr": 0.1})

    def test_closures_are_refused(self) -> None:
        rate = 0.5

        def rule(p, g):
            return p - g * rate

        with pytest.raises(TypeError, match="captures rate"):
            rule_optimizer("No", rule, state={}, defaults={})

    def test_globals_are_refused_in_the_rule_and_in_those_it_calls(self) -> None:
        def reads(p, g):
            return p - g * FACTOR

        def calls(p, g):
            return p - shrunk(g, math.pi)

        for rule, name in ((reads, "FACTOR"), (calls, "math")):
            with pytest.raises(TypeError, match=f"reads the global '{name}'"):
                rule_optimizer("No", rule, state={}, defaults={})

    @pytest.mark.parametrize("rule", [np.add, nn.ReLU(), max, nn.Linear], ids=["ufunc", "module", "builtin", "class"])
    def test_what_is_no_plain_function_is_refused(self, rule: Any) -> None:
        with pytest.raises((TypeError, ValueError)):
            rule_optimizer("No", rule, state={}, defaults={"lr": 1.0})

    def test_names_and_documentation(self) -> None:
        assert Heavy.__name__ == Heavy.__qualname__ == "Heavy"
        assert Heavy.__module__ == heavy.__module__
        assert Heavy.__doc__ == "Momentum whose bias is corrected."
        assert issubclass(Heavy, Optimizer)

    def test_signatures_are_those_of_the_constructors(self) -> None:
        assert (
            {"params", "extras"} <= set(inspect.signature(Heavy).parameters) <= {"params", "extras", *OPTIONS, "given"}
        )
        assert list(inspect.signature(HeavyChild).parameters) == ["params", "rate"]

    def test_two_rules_of_one_name_do_not_meet(self) -> None:
        def up(p, g, lr):
            return p + g * lr

        def down(p, g, lr):
            return p - g * lr

        ends = []
        for rule in (up, down):
            p = one()
            rule_optimizer("Same", rule, state={}, defaults={"lr": 0.25})([p]).step()
            ends.append(p[0].item())
        assert ends == [1.25, 0.75]


class TestOptions:
    def test_defaults(self) -> None:
        optimizer = Heavy([one()])
        group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        assert group == optimizer.defaults == {"lr": 0.1, "momentum": 0.9, "maximize": False}

    def test_unknown_ones_are_refused(self) -> None:
        with pytest.raises(TypeError, match=r"Heavy has no option 'beta'; it has .*\bmomentum\b"):
            Heavy([one()], lr=0.1, beta=0.9)

    def test_positions_are_refused(self) -> None:
        with pytest.raises(TypeError, match="positional"):
            Heavy([one()], 0.1)

    @pytest.mark.parametrize("value", [0.5, torch.tensor(0.5), torch.tensor([0.5], dtype=torch.float64)], ids=str)
    def test_learning_rates_of_one_element(self, value: Any) -> None:
        p = one()
        Plain([p], lr=value).step()
        assert p.tolist() == [0.5] * 3

    def test_learning_rates_of_more_elements_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"lr must have one element, got shape \(2,\)"):
            Plain([one()], lr=torch.ones(2))

    def test_no_parameters(self) -> None:
        with pytest.raises(ValueError, match="empty parameter list"):
            Plain([])

    def test_maximize_is_minimizing_the_negative(self) -> None:
        up, down = ([p] for p in (one(), one()))
        optimizers = Heavy(up, maximize=True), Heavy(down)
        for _ in range(3):
            down[0].grad = -up[0].grad
            for optimizer in optimizers:
                optimizer.step()
        assert torch.equal(up[0], down[0])
        assert up[0][0] > 1
        assert up[0].grad.tolist() == [1] * 3

    def test_a_default_of_maximize_is_that_of_the_class(self) -> None:
        ascent = rule_optimizer("Ascent", plain, state={}, defaults={"lr": 0.5, "maximize": True})
        p = one()
        ascent([p]).step()
        assert p.tolist() == [1.5] * 3

    def test_several_groups(self) -> None:
        options: list[dict[str, Any]] = [{"lr": 0.05}, {"momentum": 0.5}, {"lr": 0.2, "maximize": True}]
        params = parameters()
        oracles = [HeavyOracle(p, i, **own) for i, (p, own) in enumerate(zip(params, options, strict=True))]
        optimizer = Heavy([{"params": [p], **own} for p, own in zip(params, options, strict=True)])
        train(optimizer, range(1, 6))
        for p, oracle in zip(params, oracles, strict=True):
            oracle.train(range(1, 6))
            oracle.check(p, optimizer.state[p])

    def test_a_group_that_comes_later_counts_from_one(self) -> None:
        first, second = one(), one()
        optimizer = Halving([first])
        optimizer.step()
        optimizer.add_param_group({"params": [second], "lr": 2.0})
        optimizer.step()
        assert [optimizer.state[p]["step"].item() for p in (first, second)] == [2, 1]
        # 1 - 1/2 - 2/4, and 1 - 2/2.
        assert first.tolist() == second.tolist() == [0.0] * 3

    def test_options_that_change(self) -> None:
        p = one()
        optimizer = Plain([p], lr=0.5)
        scheduler = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        assert p.tolist() == [1 - 0.5 - 0.25 - 0.125] * 3
        optimizer.param_groups[0]["maximize"] = True
        optimizer.step()
        assert p.tolist() == [1 - 0.5 - 0.25 - 0.125 + 0.0625] * 3
