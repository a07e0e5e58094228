"""Optimizers made of rules: what they compute, and that they are optimizers like any other."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bagua_kernels.optim import SGD, AdamW, Extras, rule_optimizer
from bagua_kernels.optim.fuse.optimizer import fuse_optimizer
from tests.grids import grid, only
from tests.optim.rules import Halving, Heavy, HeavyChild, HeavyOracle, Plain, one, parameters, train


class TestSteps:
    @pytest.mark.parametrize(
        ("dtype", "rtol", "atol"),
        only(
            [(torch.float32, 1e-5, 1e-6), (torch.float64, 1e-13, 1e-14), (torch.bfloat16, 2**-6, 2**-6)],
            (torch.float32, 1e-5, 1e-6),
            (torch.float64, 1e-13, 1e-14),
        ),
        ids=str,
    )
    def test_dtypes(self, dtype: torch.dtype, rtol: float, atol: float) -> None:
        params = parameters(dtype)
        oracles = [HeavyOracle(p, i) for i, p in enumerate(params)]
        optimizer = Heavy(params)
        train(optimizer, range(1, 6))
        for p, oracle in zip(params, oracles, strict=True):
            oracle.train(range(1, 6))
            assert p.dtype == optimizer.state[p]["velocity"].dtype == dtype
            oracle.check(p, optimizer.state[p], rtol, atol)

    def test_derive_is_in_float64(self) -> None:
        """1 - 0.9999 has three digits in float32."""
        p = one(0.0)
        optimizer = Heavy([p], lr=1.0, momentum=0.9999)
        for _ in range(2):
            optimizer.step()
        beta = 0.9999
        wanted = -1 - (1 + beta) * (1 - beta) / (1 - beta**2)
        np.testing.assert_allclose(p.detach().numpy(), wanted, rtol=2e-7)

    def test_derive_sees_options_and_step(self) -> None:
        seen: list[tuple[float, float]] = []

        def derive(options: Any, step: Any) -> dict[str, Any]:
            seen.append((options["lr"], step))
            return {"size": options["lr"] * step}

        def rule(p, g, size):
            return p - g * size

        kind = rule_optimizer("Derived", rule, state={}, defaults={"lr": 0.25}, derive=derive)
        seen.clear()
        p, q = one(), one()
        optimizer = kind([{"params": [p]}, {"params": [q], "lr": 0.5}])
        for _ in range(2):
            optimizer.step()
        # Once a step for each group, whose parameters share their count.
        assert seen == [(0.25, 1), (0.5, 1), (0.25, 2), (0.5, 2)]
        assert p.tolist() == [1 - 0.25 - 0.5] * 3
        assert q.tolist() == [1 - 0.5 - 1.0] * 3

    def test_states_begin_with_their_values_and_steps_are_counted(self) -> None:
        p = one()
        optimizer = Halving([p])
        assert not optimizer.state
        values, size = 1.0, 1.0
        for step in range(1, 5):
            optimizer.step()
            size /= 2
            values -= size * step
            state = optimizer.state[p]
            assert list(state) == ["size", "last", "step"]
            assert p.tolist() == [values] * 3
            assert state["size"].tolist() == [size] * 3
            assert state["last"].tolist() == [step - 2.0] * 3
            assert state["step"] == step
            assert state["step"].dtype == torch.float32

    def test_a_parameter_without_gradient_is_left_alone_and_begins_later(self) -> None:
        p, late = one(), one()
        late.grad = None
        optimizer = Halving([p, late])
        for _ in range(2):
            optimizer.step()
        assert late not in optimizer.state
        assert late.tolist() == [1] * 3
        late.grad = torch.ones(3)
        optimizer.step()
        assert [optimizer.state[q]["step"].item() for q in (p, late)] == [3, 1]
        assert late.tolist() == [0.5] * 3
        p.grad = None
        before = copy.deepcopy(optimizer.state_dict()["state"][0])
        optimizer.step()
        torch.testing.assert_close(optimizer.state_dict()["state"][0], before, rtol=0, atol=0)

    def test_complex_states_begin_with_their_value_in_both_parts(self) -> None:
        """As complex numbers are pairs of reals, each part has to go the way of a real parameter."""
        whole = nn.Parameter(torch.ones(3, dtype=torch.complex64) * (1 + 1j))
        whole.grad = torch.ones_like(whole) * (1 + 1j)
        Halving([whole]).step()
        assert torch.view_as_real(whole.detach()).tolist() == [[0.5, 0.5]] * 3

    def test_strides(self) -> None:
        flat, strided = one(), nn.Parameter(torch.ones(4, 6).t())
        values = torch.arange(24.0).reshape(6, 4)
        strided.grad = values
        Plain([flat, strided]).step()
        assert torch.equal(strided.detach(), 1 - 0.5 * values)

    def test_gradients_are_not_written(self) -> None:
        p = one()
        optimizer = Heavy([p], maximize=True)
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        assert p.grad.tolist() == [1] * 3

    def test_closure(self) -> None:
        p = one()
        p.grad = None
        optimizer = Plain([p])

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = p.sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == 3
        assert p.tolist() == [0.5] * 3
        assert Plain([one()]).step() is None

    def test_what_cannot_be_fused_is_refused(self) -> None:
        p = one()
        p.grad = torch.ones(3).to_sparse()
        with pytest.raises(RuntimeError, match=r"Plain cannot take this step.*PyTorch has no other way"):
            Plain([p]).step()
        assert p.tolist() == [1] * 3

    @pytest.mark.parametrize("bad", [False, True])
    def test_gradient_scaler(self, bad: bool) -> None:
        p = one()
        optimizer = Halving([p])
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(p.sum())
        p.grad = torch.full((3,), float("inf") if bad else 4.0)
        scaler.step(optimizer)
        scaler.update()
        assert p.tolist() == [1.0 if bad else 0.5] * 3
        assert bad or optimizer.state[p]["step"] == 1


class TestExtras:
    def test_average_follows_the_parameter(self) -> None:
        p = one()
        optimizer = Plain([p], extras=Extras(average=0.75))
        mean, value = 1.0, 1.0
        for _ in range(4):
            optimizer.step()
            value -= 0.5
            mean = 0.75 * mean + 0.25 * value
            assert optimizer.state[p]["average"].tolist() == [mean] * 3

    @pytest.mark.parametrize(("precision", "name"), [("master", "master"), ("kahan", "compensation")])
    def test_small_updates_are_kept(self, precision: Any, name: str) -> None:
        ends = {}
        for each in ("nearest", precision):
            p = one(dtype=torch.bfloat16)
            # An eighth of the distance to the next number below 1.
            optimizer = Plain([p], lr=2.0**-11, extras=Extras(precision=each))
            for _ in range(8):
                optimizer.step()
            ends[each] = p[0].item()
        assert ends == {"nearest": 1.0, precision: 1 - 2.0**-8}
        assert name in optimizer.state[p]

    def test_states_are_those_of_the_rule_whatever_the_extras(self) -> None:
        p = one(dtype=torch.bfloat16)
        optimizer = Halving([p], extras=Extras(precision="master", average=0.5))
        optimizer.step()
        assert set(optimizer.state[p]) == {"size", "last", "step", "master", "average"}
        assert optimizer.state[p]["size"].tolist() == [0.5] * 3


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(one: Optimizer, other: Optimizer) -> bool:
    """Parameters and states, in all bits."""
    groups = zip(one.param_groups, other.param_groups, strict=True)
    pairs = [pair for a, b in groups for pair in zip(a["params"], b["params"], strict=True)]
    return all(
        torch.equal(p, q)
        and list(one.state[p]) == list(other.state[q])
        and all(torch.equal(value, other.state[q][name]) for name, value in one.state[p].items())
        for p, q in pairs
    )


class TestCopies:
    @pytest.mark.parametrize("extras", [None, Extras(average=0.9)], ids=["plain", "average"])
    def test_checkpoints(self, extras: Extras | None) -> None:
        optimizer = Heavy(parameters(), momentum=0.8, extras=extras)
        train(optimizer, range(1, 4))
        copies = [nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]]
        other = Heavy(copies, lr=5.0, extras=extras)
        other.load_state_dict(through_a_file(optimizer.state_dict()))
        assert other.param_groups[0]["lr"] == 0.1
        for each in (optimizer, other):
            train(each, range(4, 7))
        assert same(optimizer, other)
        assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == 6

    def test_a_checkpoint_from_before_the_first_step(self) -> None:
        p = one()
        optimizer = Halving([p])
        optimizer.load_state_dict(through_a_file(Halving([one()]).state_dict()))
        optimizer.step()
        assert p.tolist() == [0.5] * 3

    def test_a_state_that_a_checkpoint_lacks_begins_with_its_value(self) -> None:
        p = one()
        optimizer = Halving([p])
        optimizer.step()
        saved = through_a_file(optimizer.state_dict())
        del saved["state"][0]["size"]
        optimizer.load_state_dict(saved)
        optimizer.step()
        assert {name: value.max() for name, value in optimizer.state[p].items()} == {
            "size": 0.5,
            "last": 0.0,
            "step": 2.0,
        }

    @pytest.mark.parametrize("kind", [Heavy, HeavyChild, Halving, Plain])
    def test_classes_are_pickled_by_name(self, kind: type) -> None:
        assert pickle.loads(pickle.dumps(kind)) is kind

    @grid(
        cover=1,
        duplicate={"copy": copy.deepcopy, "pickle": lambda o: pickle.loads(pickle.dumps(o))},
        make={"made": Heavy, "child": lambda params: HeavyChild(params, 0.1), "two": Halving},
    )
    def test_copies_go_on_equally_and_on_their_own(self, make: Any, duplicate: Any) -> None:
        optimizer = make(parameters())
        train(optimizer, range(1, 3))
        other = duplicate(optimizer)
        assert type(other) is type(optimizer)
        train(optimizer, range(3, 5))
        assert not same(optimizer, other)
        train(other, range(3, 5))
        assert same(optimizer, other)

    def test_extras_are_copied(self) -> None:
        p = one(dtype=torch.bfloat16)
        optimizer = Plain([p], lr=2.0**-11, extras=Extras(precision="kahan"))
        optimizer.step()
        other = copy.deepcopy(optimizer)
        copied = other.param_groups[0]["params"][0]
        copied.grad = torch.ones_like(copied)
        for _ in range(7):
            other.step()
        assert copied.tolist() == [1 - 2.0**-8] * 3
        assert p.tolist() == [1] * 3

    def test_subclasses(self) -> None:
        plain_one, child = Heavy(parameters(), lr=0.05), HeavyChild(parameters(), 0.05)
        for each in (plain_one, child):
            train(each, range(1, 4))
        assert isinstance(child, Heavy)
        assert same(plain_one, child)


class TestHooks:
    def test_hooks_run_once_and_in_order(self) -> None:
        calls: list[str] = []
        optimizer = HeavyChild([one()], 0.1)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
        optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        assert calls == ["before", "after", "saved", "loaded", "before", "after"]

    def test_fuse_optimizer_returns_it_as_it_is(self) -> None:
        optimizer = Heavy([one()])
        assert fuse_optimizer(optimizer) is optimizer
        assert type(optimizer) is Heavy

    def test_it_steps_beside_others(self) -> None:
        params = [one(), one(), one()]
        optimizers = [Plain([params[0]]), SGD([params[1]], lr=0.5), AdamW([params[2]], lr=0.5, weight_decay=0.0)]
        for optimizer in optimizers:
            optimizer.step()
        for p in params:
            np.testing.assert_allclose(p.detach().numpy(), 0.5, rtol=1e-6)
