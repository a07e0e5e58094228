"""Optimizers inside of what people build around them: scalers, schedulers, closures, compilers, threads, sharding."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import lr_scheduler

from bagua_kernels import optim
from tests.grids import grid, only

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    **{name: {"lr": 0.01} for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Rprop", "Muon")},
    "Adagrad": {"lr": 0.1},
    "Adadelta": {"lr": 1.0},
    "RMSprop": {"lr": 0.01, "momentum": 0.9},
    "ASGD": {"lr": 0.1, "t0": 1.0},
    **{name: {"lr": 0.01, "weight_decay": 0.1} for name in ("Lion", "LAMB")},
    "LARS": {"lr": 1.0, "weight_decay": 0.1},
}
IN_TORCH = [name for name in OPTIONS if hasattr(torch.optim, name)]
WITH_FLAGS = [name for name in IN_TORCH if name != "Muon"]

torch_imports_its_past = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
every_optimizer = grid(cover=1, name=list(OPTIONS))


def make(name: str, parameters: Any, library: Any = optim, **more: Any) -> torch.optim.Optimizer:
    return getattr(library, name)(parameters, **OPTIONS[name] | more)


def reference(name: str, parameters: Any, **more: Any) -> torch.optim.Optimizer:
    """torch's own where there is one."""
    return make(name, parameters, torch.optim if hasattr(torch.optim, name) else optim, **more)


class Net(nn.Module):
    """Matrices only, as Muon wants it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
    x = x.to(next(model.parameters()).dtype)
    return (model(x) - x[:, :3].sin()).square().mean()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, go: Callable[[], Any] | None = None, sign: int = 1
) -> None:
    for step in steps:
        optimizer.zero_grad()
        (sign * loss_of(model, step)).backward()
        (go or optimizer.step)()


def pair(name: str) -> tuple[Any, Any]:
    """The same model twice, with our optimizer and with the reference."""
    models = Net(), Net()
    return models, (make(name, models[0].parameters()), reference(name, models[1].parameters()))


def close(name: str, actual: Any, expected: Any) -> None:
    """Up to the order of a few float32 operations; Muon's bfloat16 iteration magnifies them."""
    if isinstance(actual, (nn.Module, torch.optim.Optimizer)):
        actual, expected = actual.state_dict(), expected.state_dict()
        actual, expected = actual.get("state", actual), expected.get("state", expected)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4 if name == "Muon" else 2e-6)


@grid(name=list(OPTIONS), unscale={"": False, "unscale": True}, bad=[float("inf"), float("nan")], cover=1)
def test_scaler_skips_a_bad_step_exactly(name: str, unscale: bool, bad: float) -> None:
    """The first step and a later one are bad; what follows is what torch does."""
    models, optimizers = pair(name)
    scalers = [torch.amp.GradScaler(device="cpu", init_scale=1024.0, growth_interval=2) for _ in models]
    for step in range(6):
        before = copy.deepcopy((models[0].state_dict(), optimizers[0].state_dict()["state"]))
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if step in (0, 3):
                model.second.weight.grad[1, 2] = bad
            if unscale or optimizer is optimizers[1]:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e9 if not unscale else 0.1)
            scaler.step(optimizer)
            scaler.update()
        if step == 3:
            after = models[0].state_dict(), optimizers[0].state_dict()["state"]
            torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert not {"grad_scale", "found_inf"} & vars(optimizers[0]).keys()
        close(name, *models)
    close(name, *optimizers)


@every_optimizer
def test_scale_set_by_the_user(name: str) -> None:
    models, optimizers = pair(name)
    if not getattr(optimizers[0], "_step_supports_amp_scaling", False):
        pytest.skip("divides no gradients itself")
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, step).backward()
        for p in models[0].parameters():
            p.grad.mul_(8.0)
        optimizers[0].grad_scale, optimizers[0].found_inf = torch.tensor(8.0), torch.tensor(float(step == 2))
        optimizers[0].step()
        if step != 2:
            optimizers[1].step()
        close(name, *models)
    close(name, *optimizers)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@grid(cover=1, name=["SGD", "Adagrad"])
def test_scaler_with_sparse_gradients(name: str) -> None:
    models = [nn.Embedding(10, 4, sparse=True) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    more = {"momentum": 0.0, "dampening": 0.0} if name == "SGD" else {}
    optimizers = make(name, models[0].parameters(), **more), reference(name, models[1].parameters(), **more)
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0)
            optimizer.zero_grad()
            scaler.scale(model(torch.tensor([1, 3, 3, step])).square().sum()).backward()
            if optimizer is optimizers[1]:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    close(name, *models)


@every_optimizer
def test_closure(name: str) -> None:
    """Runs with gradients on although the step is under `no_grad`; its value is what the step returns."""
    models, optimizers = pair(name)

    def closure(i: int) -> Tensor:
        assert torch.is_grad_enabled()
        optimizers[i].zero_grad()
        loss = loss_of(models[i], 0)
        loss.backward()
        return loss

    for _ in range(3):
        with torch.no_grad():
            losses = [optimizer.step(functools.partial(closure, i)) for i, optimizer in enumerate(optimizers)]
        close(name, losses[0].detach(), losses[1].detach())
    close(name, *models)
    assert optimizers[0].step() is None


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=9),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5),
}


@grid(
    name=["SGD", "AdamW", "NAdam", "RMSprop", "Lion", "LARS"],
    scheduler=list(SCHEDULERS),
    tensor={"number": False, "tensor": True},
    cover=1,
)
def test_schedulers(name: str, scheduler: str, tensor: bool) -> None:
    models = Net(), Net()
    histories = []
    for model, make_one in zip(models, (make, reference), strict=True):
        lr = OPTIONS[name]["lr"]
        optimizer = make_one(name, model.parameters(), lr=torch.tensor(lr) if tensor else lr)
        schedule, history = SCHEDULERS[scheduler](optimizer), []
        for step in range(8):
            train(model, optimizer, range(step, step + 1))
            schedule.step(*[1.0] * (scheduler == "ReduceLROnPlateau"))
            group = optimizer.param_groups[0]
            history.append((float(group["lr"]), group.get("momentum"), group.get("betas")))
        assert isinstance(optimizer.param_groups[0]["lr"], Tensor) == tensor
        histories.append(history)
    assert histories[0] == histories[1]
    assert len(set(histories[0])) > 2
    close(name, *models)


@grid(cover=1, name=[n for n in OPTIONS if n != "Muon"])
def test_maximizing_is_minimizing_the_negative(name: str) -> None:
    up, down = Net(), Net()
    train(up, make(name, up.parameters(), maximize=True), range(4), sign=-1)
    train(down, make(name, down.parameters()), range(4))
    close(name, up, down)


@grid(cover=1, when=["before the first step", "with the state reloaded", "as it is"], name=["SGD", "AdamW", "LAMB"])
def test_model_that_changes_its_dtype(name: str, when: str) -> None:
    """States of another dtype than their parameter's are used correctly or, as torch does at times, refused."""
    models, optimizers = pair(name)
    for model, optimizer in zip(models, optimizers, strict=True):
        if when != "before the first step":
            train(model, optimizer, range(1))
        model.double()
        if optimizer is optimizers[1] or when == "with the state reloaded":
            optimizer.load_state_dict(optimizer.state_dict())
    try:
        train(models[0], optimizers[0], range(1, 3))
    except (RuntimeError, TypeError, ValueError):
        assert when == "as it is"
    else:
        train(models[1], optimizers[1], range(1, 3))
        close(name, *models)


@grid(cover=1, name=WITH_FLAGS)
def test_differentiable_is_torchs(name: str) -> None:
    """The gradient passes through a step."""
    gradients = []
    for library in (optim, torch.optim):
        start = torch.linspace(0.5, 1.5, 12, dtype=torch.float64).view(3, 4).requires_grad_()
        p = start.clone()
        optimizer = make(name, [p], library, differentiable=True)
        p.grad = start.sin()
        optimizer.step()
        p.square().sum().backward()
        gradients.append(start.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_falling_back_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="bagua_kernels.optim")
    p = torch.ones(3, requires_grad=True).clone()
    optimizer = optim.RAdam([p], differentiable=True)
    for _ in range(3):
        p.grad = torch.ones(3)
        optimizer.step()
    assert len([r for r in caplog.records if r.name.startswith("bagua_kernels.optim")]) == 1


@grid(cover=1, name=[n for n in WITH_FLAGS if n not in ("SGD", "Adagrad")])
def test_capturable_is_for_accelerators(name: str) -> None:
    errors = []
    for library in (optim, torch.optim):
        p = nn.Parameter(torch.ones(3, 4))
        p.grad = torch.ones(3, 4)
        optimizer = make(name, [p], library, capturable=True)
        with pytest.raises((AssertionError, RuntimeError)) as caught:
            optimizer.step()
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


@pytest.mark.slow
@torch_imports_its_past
@pytest.mark.parametrize("name", only(OPTIONS, "AdamW", "LAMB", "SGD", "Muon"))
def test_compiled_steps(name: str) -> None:
    torch._dynamo.reset()
    models = Net(), Net()
    optimizers = make(name, models[0].parameters()), make(name, models[1].parameters())
    train(models[0], optimizers[0], range(4), go=torch.compile(lambda: optimizers[0].step(), backend="eager"))
    train(models[1], optimizers[1], range(4))
    close(name, *models)
    close(name, *optimizers)


@torch_imports_its_past
@grid(name=list(OPTIONS), by=["hooks", "torch.distributed.optim"], cover=1)
def test_gradients_released_during_backward(name: str, by: str) -> None:
    """An optimizer for each parameter, stepped as soon as its gradient is there."""
    model, expected = Net(), Net()
    if by == "hooks":
        optimizers = {p: make(name, [p]) for p in model.parameters()}

        def step_one(p: Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step_one)
    else:
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(getattr(optim, name), model.parameters(), OPTIONS[name])
    for step in range(4):
        loss_of(model, step).backward()
        assert all(p.grad is None for p in model.parameters())
    train(expected, reference(name, expected.parameters()), range(4))
    close(name, model, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", only(OPTIONS, "SGD", "LAMB", "Muon"))
def test_threads_do_not_meet(name: str) -> None:
    """Eight threads, each with a model of its own, large enough that steps run in parallel themselves."""

    def run(seed: int) -> Tensor:
        p = nn.Parameter(torch.randn(190, 200, generator=torch.Generator().manual_seed(seed)))
        optimizer = make(name, [p], **({"ns_steps": 1} if name == "Muon" else {}))
        for step in range(5):
            p.grad = torch.cos(p.detach() * (seed + step))
            optimizer.step()
        return p.detach()

    alone = [run(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(run, range(8)))
    assert all(map(torch.equal, together, alone))


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@grid(cover=1, name=only([n for n in OPTIONS if n != "Muon"], "SGD", "AdamW", "LAMB"))
def test_number_of_threads_does_not_change_a_bit(name: str, threads: Callable[[int], None]) -> None:
    """Norms included; Muon's products are torch's, which makes no such promise."""
    results = []
    for number in (1, 2):
        threads(number)
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(n, generator=generator)) for n in (150_001, 7, 33_000)]
        optimizer = make(name, parameters)
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        results.append([p.detach() for p in parameters])
        assert torch.get_num_threads() == number
    assert all(map(torch.equal, *results))


@grid(name=list(OPTIONS), placement={"shard": Shard(0), "replicate": Replicate()}, cover=1)
def test_distributed_tensors(name: str, placement: Any, one_process: dist.DeviceMesh) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(9, 5, generator=generator) for _ in range(4)]
    plain = nn.Parameter(values[0].clone())
    sharded = nn.Parameter(distribute_tensor(values[0].clone(), one_process, [placement]))
    optimizers = make(name, [sharded]), make(name, [plain])
    for g in values[1:]:
        sharded.grad, plain.grad = distribute_tensor(g, one_process, [placement]), g
        optimizers[1].step()
        if name in ("LAMB", "LARS") and placement == Shard(0):
            with pytest.raises(RuntimeError, match="norms of whole tensors"):
                optimizers[0].step()
            return
        optimizers[0].step()
    assert isinstance(sharded.data, DTensor)
    close(name, sharded.detach().to_local(), plain.detach())
    for key, value in optimizers[1].state[plain].items():
        ours = optimizers[0].state[sharded][key]
        if isinstance(value, Tensor) and value.shape == plain.shape:
            assert isinstance(ours, DTensor)
            assert ours.placements == sharded.placements
            close(name, ours.to_local(), value)


@grid(cover=1, name=[n for n in OPTIONS if n not in ("LAMB", "LARS")])
def test_fully_sharded_model(name: str, one_process: dist.DeviceMesh) -> None:
    model, expected = Net(), Net()
    fully_shard(model, mesh=one_process)
    train(model, make(name, model.parameters()), range(4))
    train(expected, reference(name, expected.parameters()), range(4))
    for p, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        close(name, p.detach().full_tensor(), wanted.detach())
