"""Fused optimizers in training loops: checkpoints, schedulers, hooks, scalers, copies and algorithms."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from bagua_kernels.algorithms import ByteGrad, GradientAllReduce
from bagua_kernels.comm import run_ranks
from bagua_kernels.optim.fuse.optimizer import fuse_optimizer
from tests.algorithms import ranks
from tests.optim.fuse.steps import assert_same, flat, give_gradients, pair, parameters


def test_checkpoints_go_both_ways_in_the_middle_of_training():
    def make(ps):
        return torch.optim.AdamW([{"params": ps[:3], "lr": 0.1}, {"params": ps[3:]}], amsgrad=True)

    left, plain, right, fused = pair(make)
    for step in range(12):
        give_gradients(step, left, right, skip=(1,) if step == 2 else ())
        plain.step()
        fused.step()
        if step in (4, 8):
            one, other = io.BytesIO(), io.BytesIO()
            torch.save(plain.state_dict(), one)
            torch.save(fused.state_dict(), other)
            one.seek(0)
            other.seek(0)
            if step == 4:  # Into new optimizers, exchanged ...
                plain, fused = make(left), fuse_optimizer(make(right))
            plain.load_state_dict(torch.load(other))  # ... and into the old ones.
            fused.load_state_dict(torch.load(one))
        assert_same(plain, fused)
    # Of the first group, the parameter in the middle was skipped once.
    assert flat(fused) == 1


def test_an_optimizer_is_fused_in_the_middle_of_training():
    left, right = parameters(), parameters()
    plain, fused = torch.optim.Adam(left), torch.optim.Adam(right)
    for step in range(9):
        give_gradients(step, left, right, skip=(5, 6) if step == 1 else ())
        plain.step()
        fused.step()
        if step == 3:
            assert fuse_optimizer(fused) is fused
    assert_same(plain, fused)
    assert flat(fused) == 1


@pytest.mark.parametrize("early", [True, False])
def test_schedulers_write_options_and_count_steps(early):
    left, right = parameters(), parameters()
    plain, fused = (torch.optim.SGD(ps, lr=0.1, momentum=0.9) for ps in (left, right))

    def schedules(optimizer):
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        return warmup, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=20)

    if not early:
        ours = schedules(fused)
    fuse_optimizer(fused)
    if early:
        ours = schedules(fused)
    theirs = schedules(plain)
    for step in range(8):
        give_gradients(step, left, right)
        plain.step()
        fused.step()
        for schedule in (*ours, *theirs):
            schedule.step()
    assert_same(plain, fused)
    assert flat(fused) == 1


def test_late_groups_frozen_parameters_and_unfreezing():
    left, right = parameters(), parameters()
    new, also_new = parameters(seed=9), parameters(seed=9)
    for p in (left[1], right[1], left[2], right[2]):
        p.requires_grad_(False)
    plain, fused = torch.optim.Adam(left), fuse_optimizer(torch.optim.Adam(right))
    for step in range(9):
        if step == 3:
            plain.add_param_group({"params": new, "lr": 0.3})
            fused.add_param_group({"params": also_new, "lr": 0.3})
        if step == 6:
            for p in (left[1], right[1], left[2], right[2]):
                p.requires_grad_(True)
        give_gradients(step, left, right, skip=(1, 2) if step < 6 else ())
        give_gradients(step, new, also_new)
        plain.step()
        fused.step()
        assert_same(plain, fused)


def test_hooks_run_once_and_closures_are_evaluated_once():
    left, plain, right, fused = pair(torch.optim.RMSprop)
    seen = []
    fused.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append("pre"))
    fused.register_step_post_hook(lambda optimizer, args, kwargs: seen.append("post"))
    every = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: seen.append("all"))

    def closure(ps, optimizer):
        def run():
            optimizer.zero_grad()
            loss = sum((p * p).sum() for p in ps)
            loss.backward()
            return loss

        return run

    try:
        loss = fused.step(closure(right, fused))
    finally:
        every.remove()
    assert torch.equal(loss, plain.step(closure=closure(left, plain)))
    assert seen == ["pre", "post", "all"]
    fused.step(closure=closure(right, fused))
    plain.step(closure(left, plain))
    assert_same(plain, fused)


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["scaled by the scaler", "scaled by the optimizer"])
def test_gradient_scaler(options):
    shapes = [(64,), (128,), (5, 3)]
    left, plain, right, fused = pair(lambda ps: torch.optim.Adam(ps, lr=0.1, **options), shapes=shapes)
    assert getattr(fused, "_step_supports_amp_scaling", False) is bool(options)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) for _ in range(2)]
    for step in range(8):
        for ps, optimizer, scaler in zip((left, right), (plain, fused), scalers, strict=True):
            optimizer.zero_grad()
            loss = sum((p * p).sum() for p in ps) * (float("inf") if step == 3 else 1.0)
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(ps, 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same(plain, fused)
    assert flat(fused) == 1


def saved_and_loaded(both):
    file = io.BytesIO()
    torch.save(both, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved_and_loaded, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies_are_fused_and_independent(duplicate):
    left, plain, right, fused = pair(torch.optim.Adamax)
    for step in range(2):
        give_gradients(step, left, right)
        plain.step()
        fused.step()
    public = {name for name in vars(fused) if not name.startswith("_")}
    others, copied = duplicate((right, fused))
    assert type(copied) is type(fused)
    assert {name for name in vars(copied) if not name.startswith("_")} == public
    frozen = [p.detach().clone() for p in right]
    for step in range(2, 6):
        give_gradients(step, left, others, skip=(2,) if step == 3 else ())
        plain.step()
        copied.step()
        assert_same(plain, copied)
    assert flat(copied) == 2
    assert all(torch.equal(p, q) for p, q in zip(right, frozen, strict=True))


@pytest.mark.parametrize("wrap", [GradientAllReduce, ByteGrad])
def test_with_the_algorithms_of_this_project(wrap):
    def train(communicator, fuse: bool):
        module = ranks.Odd(seed=communicator.rank)
        algorithm = wrap(module, communicator=communicator)
        optimizer = torch.optim.RMSprop(algorithm.parameters(), lr=0.01, momentum=0.9)
        if fuse:
            fuse_optimizer(optimizer)
        for step in range(6):
            if step in (3, 5):
                optimizer.zero_grad(set_to_none=step == 3)
            elif step != 4:
                optimizer.zero_grad()
            algorithm(ranks.batch(communicator.rank, step)).square().mean().backward()
            optimizer.step()
        if fuse:
            assert flat(optimizer) == 1
        return [p.detach().clone() for p in algorithm.parameters()]

    plain, fused = (run_ranks(2, lambda c, fuse=fuse: train(c, fuse)) for fuse in (False, True))
    for one, other in itertools.chain(zip(plain, fused, strict=True), [(fused[0], fused[1])]):
        assert all(torch.equal(p, q) for p, q in zip(one, other, strict=True))


def test_the_page_about_it_runs():
    page = (Path(__file__).parents[3] / "docs" / "fuse-optimizer.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})
