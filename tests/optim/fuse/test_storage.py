"""Flat storage under a fused optimizer: what lies there, and what is noticed when it is moved or changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bagua_kernels.optim.fuse.optimizer import fuse_optimizer
from tests.optim.fuse.steps import Counting, assert_same, flat, give_gradients, pair, parameters


def test_parameters_gradients_and_states_are_views_of_flat_storage():
    params = parameters(shapes=[(3,), (17, 5), (64,)])
    optimizer = fuse_optimizer(torch.optim.Adam(params))
    give_gradients(0, params)
    optimizer.step()

    def storages(tensors) -> set[int]:
        return {t.untyped_storage().data_ptr() for t in tensors}

    assert [p.data_ptr() - params[0].data_ptr() for p in params] == [0, 4 * 64, 4 * (64 + 128)]
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in params)
    assert len(storages(p.grad for p in params)) == 1
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert len(storages(optimizer.state[p][key] for p in params)) == 1
    assert params[0].grad.untyped_storage().nbytes() == 4 * (64 + 128 + 64)
    before = [p.grad.data_ptr() for p in params]
    optimizer.zero_grad(set_to_none=False)
    sum((p * p).sum() for p in params).backward()
    optimizer.step()
    assert [p.grad.data_ptr() for p in params] == before
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


@pytest.mark.parametrize("name", ["Adam", "SGD", "RMSprop", "ASGD", "Adagrad"])
def test_skipped_parameters_keep_values_state_and_step(name):
    options = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    left, plain, right, fused = pair(lambda ps: getattr(torch.optim, name)(ps, lr=0.05, **options))
    patterns = [(0, 1, 2, 3, 4, 5, 6, 7), (2,), (), (0, 7), (0, 7), (1, 3, 5), (0, 2, 4, 6), (), (6,), ()]
    for step, skip in enumerate(patterns):
        give_gradients(step, left, right, skip=skip)
        plain.step()
        fused.step()
        assert_same(plain, fused)


def test_data_that_is_swapped_and_state_that_is_changed_are_noticed():
    left, plain, right, fused = pair(torch.optim.Adam)
    for step in range(12):
        for ps, optimizer in ((left, plain), (right, fused)):
            if step == 3:
                ps[1].data = ps[1].data + 1
            if step == 5:
                optimizer.state[ps[0]]["step"] += 4
            if step == 7:
                optimizer.state[ps[2]]["exp_avg"] = torch.ones_like(ps[2])
            if step == 8:
                optimizer.state[ps[3]]["exp_avg"].fill_(2.0)
            if step == 9:
                optimizer.state.pop(ps[4])
            if step == 10:
                optimizer.state.pop(optimizer.param_groups[0]["params"].pop(2))
        give_gradients(step, left, right)
        plain.step()
        fused.step()
        assert_same(plain, fused)
    assert right[1].data_ptr() - right[0].data_ptr() == 4 * 64


def test_parameters_that_move_to_shared_memory_stay_there():
    """As without fusing: other processes see each step."""
    left, plain, right, fused = pair(torch.optim.Adam)
    for step in range(4):
        give_gradients(step, left, right)
        plain.step()
        fused.step()
        assert_same(plain, fused)
        if step == 1:
            for p in right[:4]:
                p.share_memory_()
            before = [p.data_ptr() for p in right[:4]]
    assert [p.data_ptr() for p in right[:4]] == before
    assert all(p.is_shared() for p in right[:4])


def test_autograd_sees_that_parameters_change():
    params = parameters()
    fused = fuse_optimizer(torch.optim.SGD(params, lr=0.1))
    loss = sum((p * p).sum() for p in params)
    give_gradients(0, params)
    fused.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_step_that_fails_leaves_everything_in_place():
    class Failing(Counting):
        fail = False

        def step(self, closure=None):
            super().step()
            if self.fail:
                raise KeyError("for the test")

    left, plain, right, fused = pair(Failing)
    for step in range(4):
        plain.fail = fused.fail = step == 1
        give_gradients(step, left, right)
        for optimizer in (plain, fused):
            try:
                optimizer.step()
            except KeyError:
                assert step == 1
        assert_same(plain, fused)


def transpose_parameter(p: nn.Parameter) -> None:
    p.data = p.data.t()


def transpose_gradient(p: nn.Parameter) -> None:
    p.grad = p.grad.t()


def transpose_both(p: nn.Parameter) -> None:
    transpose_parameter(p)
    transpose_gradient(p)


@pytest.mark.parametrize("change", [transpose_parameter, transpose_gradient, transpose_both])
def test_other_strides_at_the_same_address(change: Callable[[nn.Parameter], None]) -> None:
    params, plain, twins, fused = pair(lambda ps: torch.optim.Adam(ps, lr=0.1), shapes=[(5, 5)] * 3)
    for step in range(4):
        give_gradients(step, params, twins)
        if step == 2:
            plain.step()
            fused.step()
            change(params[1])
            change(twins[1])
        plain.step()
        fused.step()
        assert_same(plain, fused)
    assert flat(fused) == 1


@pytest.mark.parametrize(
    "make", [lambda ps: torch.optim.AdamW(ps, lr=0.1), lambda ps: torch.optim.SGD(ps, momentum=0.9)]
)
def test_unflatten(make: Callable[..., torch.optim.Optimizer]) -> None:
    params, plain, twins, fused = pair(make)
    fused.unflatten()  # before the first step there is nothing to do
    for step in range(6):
        skip = (3,) if step < 2 else ()
        give_gradients(step, params, twins, skip=skip)
        plain.step()
        fused.step()
        assert flat(fused) > 0
        if step % 2:
            before = [p._version for p in twins]
            fused.unflatten()
            assert [p._version for p in twins] == before
            states = [v for p in twins for v in fused.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
            kept = [*twins, *states, *(p.grad for p in twins if p.grad is not None)]
            assert all(t.untyped_storage().nbytes() == t.nbytes and t.storage_offset() == 0 for t in kept)
            assert len({t.untyped_storage().data_ptr() for t in kept}) == len(kept)
            assert all(p.stride() == q.stride() for p, q in zip(params, twins, strict=True))
        assert_same(plain, fused)


def test_unflatten_leaves_what_others_have_moved() -> None:
    _, _, twins, fused = pair(lambda ps: torch.optim.AdamW(ps, lr=0.1))
    give_gradients(0, twins)
    fused.step()
    elsewhere = torch.zeros(100)
    twins[1].data = elsewhere[: twins[1].numel()].view_as(twins[1])
    fused.unflatten()
    assert twins[1].data_ptr() == elsewhere.data_ptr()
