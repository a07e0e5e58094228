"""Which optimizers are fused, which are refused, and which are left alone."""

from __future__ import annotations

import copy

import pytest
import torch

from bagua_kernels.optim.fuse.optimizer import NotElementwiseError, fuse_optimizer
from tests.grids import grid
from tests.optim.fuse.steps import Lamb, assert_same, give_gradients, parameters


class Centralized(Lamb):
    def update(self, p, group):
        p.sub_((p.grad - p.grad.mean(0, keepdim=True) if p.ndim == 4 else p.grad) * group["lr"])


class FactorsLarge(Lamb):
    def update(self, p, group):
        scale = p.grad.mean(0) if p.ndim == 2 and min(p.shape) >= 128 else 1
        p.sub_(p.grad * scale * group["lr"])


class NowAndThen(Lamb):
    def update(self, p, group):
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        p.sub_(p.grad * group["lr"] * (p.grad.norm() if state["step"] % 10 == 0 else 1))


class Factored(Lamb):
    """Has a state from the start, as Adagrad, that belongs to rows."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, lr)
        for p in self.param_groups[0]["params"]:
            self.state[p]["rows"] = torch.zeros(2 * p.shape[0])

    def update(self, p, group):
        p.sub_(p.grad * group["lr"])


class Noisy(Lamb):
    def update(self, p, group):
        p.sub_(torch.randn_like(p) * group["lr"])


class Sharp(Lamb):
    """As SAM: a second look at the loss."""

    def step(self, closure=None):
        if closure is not None:
            closure()
            closure()
        super().step()

    def update(self, p, group):
        p.sub_(p.grad * group["lr"])


class Remote(Lamb):
    """Steps its own list of tensors, which a copy does not have."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, lr)
        self.kept = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.kept:
            if p.grad is not None:
                p.sub_(p.grad)


@grid(
    cover=1,
    make__reason=[
        (Lamb, "not elementwise"),
        (Centralized, "not elementwise"),
        (FactorsLarge, "not elementwise"),
        (NowAndThen, "not elementwise"),
        (Noisy, "not elementwise"),
        (Factored, "state cannot be flattened"),
        (Sharp, "closure 2 times"),
        (Remote, "does not change a parameter"),
        (torch.optim.Adafactor, "not elementwise"),
        (torch.optim.LBFGS, "needs a closure"),
        (torch.optim.SparseAdam, "SparseAdam does not support dense gradients"),
        (lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2]), "must be a 2D matrix"),
        (lambda ps: torch.optim.Adam(ps, differentiable=True), "pass differentiable=False"),
        (lambda ps: Lamb(ps, lr=0.0), "not elementwise"),
    ],
)
def test_what_is_not_elementwise_is_refused_and_left_alone(make, reason):
    params = parameters()
    optimizer = make(params)
    before, kind, state = copy.deepcopy(params), type(optimizer), torch.get_rng_state()
    with pytest.raises(NotElementwiseError, match=reason):
        fuse_optimizer(optimizer)
    assert type(optimizer) is kind
    assert not optimizer.state or kind is Factored
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_no_optimizer_or_has_another_step_is_refused():
    with pytest.raises(TypeError, match=r"takes a torch\.optim\.Optimizer, got int"):
        fuse_optimizer(3)
    optimizer = torch.optim.SGD(parameters())
    optimizer.step = print
    with pytest.raises(ValueError, match="step of this optimizer was replaced"):
        fuse_optimizer(optimizer)


def test_an_optimizer_that_is_fused_already_is_returned():
    class Ours(torch.optim.SGD):
        _fuses = True

    for optimizer in (Ours(parameters()), fuse_optimizer(torch.optim.SGD(parameters()))):
        assert fuse_optimizer(optimizer) is optimizer


def test_an_instance_that_was_not_tried_is_not_fused():
    fused = fuse_optimizer(torch.optim.Adam(parameters()))
    left, right = parameters(), parameters()
    plain, made = torch.optim.Adam(left), type(fused)(right)
    give_gradients(0, left, right)
    plain.step()
    made.step()
    assert_same(plain, made)
    assert made._flat_step is None


def test_a_group_whose_options_are_not_elementwise_is_not_added():
    class Sometimes(Lamb):
        def update(self, p, group):
            p.sub_(p.grad * group["lr"] * (p.norm() if group.get("adapt") else 1))

    fused = fuse_optimizer(Sometimes(parameters()))
    with pytest.raises(NotElementwiseError):
        fused.add_param_group({"params": parameters(), "adapt": True})
    assert len(fused.param_groups) == 1


def test_a_group_that_is_differentiable_is_refused_later() -> None:
    fused = fuse_optimizer(torch.optim.Adam(parameters(), lr=0.1))
    with pytest.raises(NotElementwiseError, match="pass differentiable=False"):
        fused.add_param_group({"params": parameters(1), "differentiable": True})
    assert len(fused.param_groups) == 1
