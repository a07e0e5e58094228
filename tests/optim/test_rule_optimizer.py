"""Optimizers made of rules: what they compute, what is refused, and that they are optimizers like any other."""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bagua_kernels.optim import SGD, AdamW, Extras, rule_optimizer
from bagua_kernels.optim.fuse.optimizer import fuse_optimizer
from bagua_kernels.rules import vocabulary as tl

F64 = npt.NDArray[np.float64]

FACTOR = 0.5
OPTIONS = ("lr", "momentum", "maximize")


def shrunk(x, rate):
    return x * rate


def heavy(p, g, m, lr, momentum, correction):
    """Momentum whose bias is corrected."""
    m = tl.fma(m, momentum, g)
    return p - m * lr * correction, m


def correct(options: Any, step: Any) -> dict[str, Any]:
    beta = options["momentum"]
    return {"correction": (1 - beta) / (1 - beta**step)}


Heavy = rule_optimizer("Heavy", heavy, state={"velocity": 0.0}, defaults={"lr": 0.1, "momentum": 0.9}, derive=correct)


class HeavyChild(Heavy):
    """A subclass with a constructor of its own."""

    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, lr=rate)


def halving(p, g, size, last, step, lr):
    """Steps that shrink with their number and on a state that begins at 1; nothing in it needs a rounding."""
    size = shrunk(size, 0.5)
    return p - g * size * lr * step, size, g + last


Halving = rule_optimizer("Halving", halving, state={"size": 1.0, "last": -2.0}, defaults={"lr": 1.0})


def plain(p, g, lr):
    return p - g * lr


Plain = rule_optimizer("Plain", plain, state={}, defaults={"lr": 0.5})


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(dtype)) for shape in ((7, 5), (130,), ())
    ]


def gradient(p: Tensor, step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)


def train(optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        index = 0
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = gradient(p, step, index)
                index += 1
        optimizer.step()


def one(value: float = 1.0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter with a gradient of ones."""
    p = nn.Parameter(torch.full((3,), value, dtype=dtype))
    p.grad = torch.ones_like(p)
    return p


class HeavyOracle:
    """What `Heavy` does to a parameter, in float64."""

    def __init__(self, p: Tensor, index: int, lr: float = 0.1, momentum: float = 0.9, maximize: bool = False) -> None:
        self.like, self.index = p.detach().clone(), index
        self.p = self.like.double().numpy().copy()
        self.m: F64 = np.zeros_like(self.p)
        self.lr, self.momentum, self.sign = lr, momentum, -1.0 if maximize else 1.0

    def train(self, steps: range) -> None:
        for t in steps:
            self.m = self.momentum * self.m + self.sign * gradient(self.like, t, self.index).double().numpy()
            self.p = self.p - self.lr * self.m * (1 - self.momentum) / (1 - self.momentum**t)

    def check(self, p: Tensor, state: dict[str, Any], rtol: float = 1e-5, atol: float = 1e-6) -> None:
        for got, wanted in ((p, self.p), (state["velocity"], self.m)):
            np.testing.assert_allclose(got.detach().double().numpy(), wanted, rtol=rtol, atol=atol)


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
        assert Heavy.__module__ == __name__
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


class TestSteps:
    @pytest.mark.parametrize(
        ("dtype", "rtol", "atol"),
        [(torch.float32, 1e-5, 1e-6), (torch.float64, 1e-13, 1e-14), (torch.bfloat16, 2**-6, 2**-6)],
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

    @pytest.mark.parametrize(
        "duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copy", "pickle"]
    )
    @pytest.mark.parametrize(
        "make", [Heavy, lambda params: HeavyChild(params, 0.1), Halving], ids=["made", "child", "two"]
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
