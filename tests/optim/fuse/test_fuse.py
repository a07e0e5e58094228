"""The oracle is the optimizer itself, unfused: what a fused one does has to be the same, bit for bit."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from bagua_kernels.algorithms import ByteGrad, GradientAllReduce
from bagua_kernels.comm import run_ranks
from bagua_kernels.optim.fuse.optimizer import NotElementwiseError, fuse_optimizer
from tests.algorithms import ranks
from tests.grids import grid, one_of_each
from tests.optim import pairs

SHAPES = [(3,), (17, 5), (64,), (31,), (2, 3, 3, 3), (1,), (130, 7), (40,)]
ELEMENTWISE = {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"}


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors on several threads mostly wait for each other; the test of large ones asks for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def configurations() -> list[tuple[str, dict[str, object]]]:
    """PyTorch's own list of what its optimizers are tested with."""
    found = []
    for entry in pairs.torchs_table().optim_db:
        if entry.optim_cls.__name__ in ELEMENTWISE:
            for given in entry.optim_inputs_func(device="cpu"):
                for path in ({"foreach": False}, {"foreach": None}, {"foreach": True}, {"fused": True}):
                    tensor_lr = isinstance(given.kwargs.get("lr"), torch.Tensor)
                    if (path == {"foreach": True} and tensor_lr) or (
                        "fused" in path and "fused" not in entry.supported_impls
                    ):
                        continue
                    found.append((entry.optim_cls.__name__, {**given.kwargs, **path}))
    return found


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32, shapes: list[tuple[int, ...]] = SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def give_gradients(step: int, *several: list[torch.Tensor], skip: tuple[int, ...] = ()) -> None:
    """Makes new gradients, equal in all lists."""
    generator = torch.Generator().manual_seed(100 + step)
    for i, same in enumerate(zip(*several, strict=True)):
        gradient = torch.randn(same[0].shape, generator=generator, dtype=torch.float64) * 10.0 ** (step % 4 - 2)
        for p in same:
            p.grad = None if i in skip else gradient.to(p.dtype)


def pair(make: Callable[..., torch.optim.Optimizer], **arguments: object):
    """An optimizer and its fused equal, each with its parameters."""
    left, right = parameters(**arguments), parameters(**arguments)
    return left, make(left), right, fuse_optimizer(make(right))


def flat(optimizer: torch.optim.Optimizer) -> int:
    """How many flat tensors the last step had."""
    return len(optimizer._flat_step.runs)


def assert_same(plain: torch.optim.Optimizer, fused: torch.optim.Optimizer) -> None:
    """Parameters, state and options are equal in every bit, key and type."""
    for group, other in zip(plain.param_groups, fused.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            assert p.stride() == q.stride()
            torch.testing.assert_close(q, p, rtol=0, atol=0, equal_nan=True)
    left, right = plain.state_dict(), fused.state_dict()
    assert repr(left["param_groups"]) == repr(right["param_groups"])
    assert left["state"].keys() == right["state"].keys()
    for index, state in left["state"].items():
        counterpart = right["state"][index]
        if not isinstance(state, dict):
            assert state == counterpart
            continue
        assert state.keys() == counterpart.keys()
        for key, value in state.items():
            other = counterpart[key]
            assert type(value) is type(other)
            if isinstance(value, torch.Tensor):
                assert value.dtype == other.dtype
                assert value.shape == other.shape
                torch.testing.assert_close(value, other, rtol=0, atol=0, equal_nan=True)
            else:
                assert value == other


@grid(
    name__options=one_of_each(
        (pytest.param(*each) for each in configurations()),
        lambda given: (given.values[0], *(key for key in ("foreach", "fused") if given.values[1].get(key))),
        lambda given: (given.values[0], *sorted(given.values[1].keys() - {"foreach", "fused"})),
        cover=1,
    ),
    dtype=[torch.float32, torch.float64],
    cover=1,
)
def test_every_elementwise_optimizer_of_torch_is_fused_bit_for_bit(name, options, dtype):
    left, plain, right, fused = pair(lambda ps: getattr(torch.optim, name)(ps, **options), dtype=dtype)
    for step in range(8):
        give_gradients(step, left, right, skip=(3,) if step == 4 else ())
        plain.step()
        fused.step()
        assert_same(plain, fused)
    # With fused=True, only tensors of whole vectors are flattened; here that is one alone, which needs no flattening.
    # A parameter that was skipped divides the run it was in, where steps are counted.
    assert flat(fused) == (0 if options.get("fused") else 1 if name == "SGD" else 2)
    assert isinstance(fused, getattr(torch.optim, name))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_torch_fused_kernels_are_flattened_where_tensors_fill_vectors(name):
    shapes = [(64,), (16, 8), (7,), (192,), (65,)]
    options = {"momentum": 0.9} if name == "SGD" else {}
    left, plain, right, fused = pair(
        lambda ps: getattr(torch.optim, name)(ps, lr=0.1, fused=True, **options), shapes=shapes
    )
    for step in range(20):
        give_gradients(step, left, right)
        plain.step()
        fused.step()
    assert_same(plain, fused)
    assert [p.shape for p in fused._flat_step.runs[0].params] == [(64,), (16, 8), (192,)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_a_cpu_stays_exact_because_it_is_not_flattened(dtype):
    left, plain, right, fused = pair(lambda ps: torch.optim.Adam(ps, weight_decay=0.1), dtype=dtype)
    for step in range(5):
        give_gradients(step, left, right)
        plain.step()
        fused.step()
    assert_same(plain, fused)
    assert flat(fused) == 0


def test_large_tensors_and_threads_change_nothing():
    torch.set_num_threads(2)
    shapes = [(70001,), (333,), *[(16001,)] * 9, (40000,), (5,)]
    left, plain, right, fused = pair(lambda ps: torch.optim.NAdam(ps, weight_decay=0.1), shapes=shapes)
    for step in range(3):
        give_gradients(step, left, right)
        plain.step()
        fused.step()
    assert_same(plain, fused)
    # A run ends where it would leave the cache; large tensors are left as they are.
    assert [len(run.params) for run in fused._flat_step.runs] == [9, 2]


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p, group):
        p.sub_(p.grad * (group["lr"] * p.norm() / p.grad.norm()))


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


class Counting(Lamb):
    """Numbers instead of tensors, state made anew each step, counters of the group and of the optimizer."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, lr)
        self.calls = 0
        self.lookup = {id(p): p for p in self.param_groups[0]["params"]}

    def step(self, closure=None):
        self.calls += 1
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        self.state["total"] = self.calls
        super().step()

    def update(self, p, group):
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        state["ema"] = state["ema"] * 0.9 + p.grad if "ema" in state else p.grad.clone()
        if state["step"] == 3:
            state["late"] = torch.ones(1, dtype=torch.int32)
            state["wide"] = p.double()
        if state["step"] == 5:
            del state["late"]
        p.sub_(state["ema"] / state["step"] * group["lr"])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
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


def test_numbers_in_state_and_counters_elsewhere():
    left, plain, right, fused = pair(Counting)
    for step in range(9):
        give_gradients(step, left, right, skip=(0, 4) if step == 6 else ())
        plain.step()
        fused.step()
        assert_same(plain, fused)
    assert plain.calls == fused.calls == 9
    assert fused.state["total"] == 9


def test_parameters_gradients_and_states_are_views_of_flat_storage():
    params = parameters(shapes=[(3,), (17, 5), (64,)])
    optimizer = fuse_optimizer(torch.optim.Adam(params))
    give_gradients(0, params)
    optimizer.step()

    def storages(tensors) -> set[int]:
        return {t.untyped_storage().data_ptr() for t in tensors}

    assert len(storages(params)) == len(storages(p.grad for p in params)) == 1
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert len(storages(optimizer.state[p][key] for p in params)) == 1
    assert params[0].untyped_storage().nbytes() == 4 * (64 + 128 + 64)
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


def test_a_group_whose_options_are_not_elementwise_is_not_added():
    class Sometimes(Lamb):
        def update(self, p, group):
            p.sub_(p.grad * group["lr"] * (p.norm() if group.get("adapt") else 1))

    fused = fuse_optimizer(Sometimes(parameters()))
    with pytest.raises(NotElementwiseError):
        fused.add_param_group({"params": parameters(), "adapt": True})
    assert len(fused.param_groups) == 1


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


def test_gradients_accumulate():
    left, plain, right, fused = pair(torch.optim.Adadelta)
    for step in range(6):
        for ps, optimizer in ((left, plain), (right, fused)):
            sum((p.sin() * (step + 1)).sum() for p in ps).backward()
            optimizer.step()
            if step % 2:
                optimizer.zero_grad(set_to_none=step == 3)
    assert_same(plain, fused)


def odd_parameters() -> list[torch.Tensor]:
    """Parameters that cannot be moved, among some that can."""
    generator = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    shared, packed = rand(8), rand(10)
    return [
        nn.Parameter(rand(5, 4)),
        nn.Parameter(rand()),
        nn.Parameter(rand(0, 3)),
        nn.Parameter(rand(6, 3).t()),
        nn.Parameter(rand(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(rand(8, 8)[:, :3]),
        nn.Parameter(torch.complex(rand(4), rand(4))),
        nn.Parameter(shared),
        nn.Parameter(shared.view(2, 4)),
        nn.Parameter(packed[2:8]),
        rand(7).requires_grad_(),
        nn.Parameter(rand(9).double()),
        nn.Parameter(rand(11).double()),
        nn.Parameter(rand(12)),
        nn.Parameter(rand(13).share_memory_()),
    ]


def test_parameters_of_all_kinds():
    left, right = odd_parameters(), odd_parameters()
    addresses = [p.data_ptr() for p in right]
    plain, fused = torch.optim.Adam(left), fuse_optimizer(torch.optim.Adam(right))
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(left, right, strict=True):
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            q.grad = p.grad.clone()
        plain.step()
        fused.step()
        assert_same(plain, fused)
    moved = [i for i, p in enumerate(right) if p.data_ptr() != addresses[i]]
    assert moved == [0, 3, 4, 10, 11, 12, 13]
    assert flat(fused) == 2


def test_sparse_gradients_are_stepped_as_they_are():
    left, right = parameters(), parameters()
    plain, fused = torch.optim.SGD(left, lr=0.1), fuse_optimizer(torch.optim.SGD(right, lr=0.1))
    for step in range(4):
        give_gradients(step, left, right)
        if step != 1:
            for p in (left[1], right[1]):
                p.grad = p.grad.to_sparse()
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
    assert right[0].untyped_storage().data_ptr() == right[1].untyped_storage().data_ptr()


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
    # Pickling by itself gives each view a storage of its own, as large as the flat one, and what the rest of it is nobody knows.
    assert flat(copied) == (2 if duplicate in (copy.deepcopy, saved_and_loaded) else 0)
    assert all(torch.equal(p, q) for p, q in zip(right, frozen, strict=True))


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


def test_a_group_that_is_differentiable_is_refused_later() -> None:
    fused = fuse_optimizer(torch.optim.Adam(parameters(), lr=0.1))
    with pytest.raises(NotElementwiseError, match="pass differentiable=False"):
        fused.add_param_group({"params": parameters(1), "differentiable": True})
    assert len(fused.param_groups) == 1
