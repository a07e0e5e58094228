"""What every algorithm on models must do, run by thread ranks: one row for each of `ALL`."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import ByteGrad
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.gossip.common import ALL, CASES, Case, flat
from tests.algorithms.local_steps import common as local_steps
from tests.algorithms.ranks import Odd, batch, fill
from tests.grids import grid, only

# Algorithms with local steps meet after each second step here.
LOCAL: dict[str, dict[str, Any]] = {
    **{"local_sgd": {}, "slow_mo": {}, "diloco": {}, "delayed": {"delay": 1}},
    "sparse_loco": {"codec": "chunked_topk:k=4,chunk=32", "dense": "absmax_int8:block=32"},
}
EVERY: dict[str, Any] = {
    **ALL,
    **{name: replace(local_steps.ALL[name], options={"interval": 2, **more}) for name, more in LOCAL.items()},
}
if hasattr(torch.optim, "Muon"):
    EVERY["mu_loco"] = replace(local_steps.MU_LOCO, options={"interval": 2, **local_steps.MU_LOCO.options})
every = grid(cover=1, case=EVERY)
several = grid(cover=1, name=only(EVERY, "decentralized", "choco", "diloco"))


def plain(module: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr)


def made(case: Case, module: nn.Module, communicator: Communicator, lr: float = 0.1, **options: Any) -> tuple[Any, Any]:
    optimizer = getattr(case, "optimizer", plain)(module, lr)
    return case.make(module, optimizer, communicator, **options), optimizer


def train(model: Any, optimizer: Any, rank: int, steps: range, *args: Any) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, step), *args).square().mean().backward()
        optimizer.step()
    model.wait()


def mean_of(everyone: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([x.double() for x in everyone]).mean(0)


@every
def test_start_is_rank_0s(case: Case) -> None:
    """Parameters, frozen ones and buffers, bit for bit."""

    def rank(communicator: Communicator) -> dict[str, torch.Tensor]:
        module = Odd(seed=communicator.rank)
        module.register_buffer("count", torch.tensor(communicator.rank + 7))
        module.calls.fill_(communicator.rank)
        model, _ = made(case, module, communicator)
        state = {name: value.clone() for name, value in module.state_dict().items()}
        model.close()
        return state

    everyone = run_ranks(3, rank)
    for other in everyone[1:]:
        assert all(torch.equal(value, other[name]) for name, value in everyone[0].items())
    assert everyone[2]["count"] == 7
    assert torch.equal(everyone[2]["first.weight"], Odd(0).first.weight)


@every
def test_synchronize_gives_all_ranks_the_mean(case: Case) -> None:
    def rank(communicator: Communicator) -> tuple[torch.Tensor, float, torch.Tensor, float]:
        module = Odd()
        model, optimizer = made(case, module, communicator)
        train(model, optimizer, communicator.rank, range(5))
        before, apart = flat(module), model.consensus()
        model.synchronize()
        after, left = flat(module), model.consensus()
        train(model, optimizer, communicator.rank, range(5, 7))
        assert model.consensus() > 0
        model.close()
        return before, apart, after, left

    everyone = run_ranks(4, rank)
    mean = mean_of([before for before, *_ in everyone])
    square = sum(float((before - mean).square().sum()) for before, *_ in everyone) / 4
    for _, apart, after, left in everyone:
        assert apart == pytest.approx(math.sqrt(square), rel=1e-4)
        assert torch.equal(after, everyone[0][2])
        assert (after - mean).abs().max() <= 1e-6 * mean.abs().max()
        assert left <= 1e-6


@every
def test_averaged_lends_the_mean(case: Case) -> None:
    """Within the block all ranks hold the mean; then each has its own parameters and buffers again, bit for bit."""

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        module = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
        fill(module)
        model, optimizer = made(case, module, communicator)
        train(model, optimizer, communicator.rank, range(4))
        before, buffer = flat(module), module[1].running_mean.clone()
        with model.averaged():
            within = flat(module)
            model.eval()
            model(batch(communicator.rank, 9))
            model.train()
        assert torch.equal(flat(module), before)
        assert torch.equal(module[1].running_mean, buffer)
        train(model, optimizer, communicator.rank, range(4, 6))
        model.close()
        return before, within

    everyone = run_ranks(3, rank)
    mean = mean_of([before for before, _ in everyone])
    for before, within in everyone:
        assert torch.equal(within, everyone[0][1])
        assert (within - mean).abs().max() <= 1e-6 * mean.abs().max()
        assert not torch.equal(before, within)


@every
def test_averaged_changes_nothing(case: Case) -> None:
    """A run that looks at the mean in the middle has the same bits."""

    def rank(communicator: Communicator, look: bool) -> torch.Tensor:
        module = Odd()
        model, optimizer = made(case, module, communicator)
        train(model, optimizer, communicator.rank, range(3))
        if look:
            with model.averaged():
                pass
            model.consensus()
            model.stats()
        train(model, optimizer, communicator.rank, range(3, 6))
        model.close()
        return flat(module)

    plain, looked = (run_ranks(3, rank, look) for look in (False, True))
    assert all(map(torch.equal, plain, looked))


@every
def test_buffers_are_local_until_synchronized(case: Case) -> None:
    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        module, plain = (nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 3)) for _ in range(2))
        for each in (module, plain):
            fill(each)
        model, optimizer = made(case, module, communicator)
        train(model, optimizer, communicator.rank, range(3))
        for step in range(3):  # the statistics of a first layer depend on examples alone
            plain(batch(communicator.rank, step))
        assert torch.equal(module[0].running_mean, plain[0].running_mean)
        assert torch.equal(module[0].running_var, plain[0].running_var)
        before = module[0].running_mean.clone()
        model.synchronize()
        model.close()
        return before, module[0].running_mean

    everyone = run_ranks(3, rank)
    assert not torch.equal(everyone[0][0], everyone[1][0])
    for _, after in everyone:
        assert torch.equal(after, everyone[0][1])
        assert torch.allclose(after.double(), mean_of([before for before, _ in everyone]), atol=1e-7)


@every
def test_no_sync_costs_nothing(case: Case) -> None:
    """Rounds hang on steps: the same bytes and bits with it and without."""

    def rank(communicator: Communicator, inside: bool) -> tuple[torch.Tensor, int]:
        module = Odd()
        model, optimizer = made(case, module, communicator)
        for step in range(4):
            optimizer.zero_grad()
            if inside:
                with model.no_sync():
                    model(batch(communicator.rank, 2 * step)).square().mean().backward()
            else:
                model(batch(communicator.rank, 2 * step)).square().mean().backward()
            model(batch(communicator.rank, 2 * step + 1)).square().mean().backward()
            optimizer.step()
        model.wait()
        sent = model.stats().bytes_sent
        model.close()
        return flat(module), sent

    plain, inside = (run_ranks(3, rank, inside) for inside in (False, True))
    for (a, sent), (b, also) in zip(plain, inside, strict=True):
        assert torch.equal(a, b)
        assert sent == also > 0


class Branches(nn.Module):
    """A branch for each rank, one that nobody uses, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(7, 3) for _ in range(4)])
        fill(self)
        self.parts[3].requires_grad_(False)

    def forward(self, x: torch.Tensor, part: int) -> torch.Tensor:
        return self.parts[part](x) + self.parts[3](x)


@every
def test_unused_and_frozen_parameters(case: Case) -> None:
    """What a rank does not use gets no gradient from it, and moves by mixing; what nobody uses, or is frozen, stays."""

    def rank(communicator: Communicator) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        module = Branches()
        start = {name: p.detach().clone() for name, p in module.named_parameters()}
        model, optimizer = made(case, module, communicator)
        train(model, optimizer, communicator.rank, range(3), communicator.rank)
        used = {name for name, p in module.named_parameters() if p.grad is not None}
        assert used == {f"parts.{communicator.rank}.{kind}" for kind in ("weight", "bias")}
        model.close()
        return start, {name: p.detach().clone() for name, p in module.named_parameters()}

    everyone = run_ranks(2, rank)
    for start, end in everyone:
        for kind in ("weight", "bias"):
            assert torch.equal(end[f"parts.3.{kind}"], start[f"parts.3.{kind}"])
            assert torch.allclose(end[f"parts.2.{kind}"], start[f"parts.2.{kind}"], atol=1e-6)
            for used in (0, 1):
                assert (end[f"parts.{used}.{kind}"] - start[f"parts.{used}.{kind}"]).abs().max() > 1e-3


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
    module[2].weight = module[0].weight
    fill(module)
    return module


def convolution() -> nn.Module:
    module = nn.Sequential(nn.Unflatten(1, (1, 7, 1)), nn.Conv2d(1, 5, (3, 1)), nn.Conv2d(5, 3, (2, 1)), nn.Flatten())
    fill(module)
    return module.to(memory_format=torch.channels_last)


@grid(case=EVERY, module=[tied, convolution])
def test_layouts_of_parameters_stay(case: Case, module: Callable[[], nn.Module]) -> None:
    """Tied parameters stay tied; strides stay."""

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        ours = module()
        strides = [p.stride() for p in ours.parameters()]
        model, optimizer = made(case, ours, communicator)
        train(model, optimizer, communicator.rank, range(3))
        assert [p.stride() for p in ours.parameters()] == strides
        if module is tied:
            assert ours[2].weight is ours[0].weight
        model.synchronize()
        model.close()
        return flat(ours), flat(module())

    everyone = run_ranks(3, rank)
    for end, start in everyone:
        assert torch.equal(end, everyone[0][0])
        assert end.isfinite().all()
        assert not torch.equal(end, start)


@several
def test_channels_last_trains_as_contiguous(name: str) -> None:
    """Values go to the same places, whatever order memory has."""
    case = EVERY[name]
    exact = {"codec": "identity"} if case in (ALL["low_precision"], ALL["choco"]) else {}

    def rank(communicator: Communicator, last: bool) -> torch.Tensor:
        module = convolution()
        if not last:
            module = module.to(memory_format=torch.contiguous_format)
        model, optimizer = made(case, module, communicator, **exact)
        train(model, optimizer, communicator.rank, range(3))
        model.close()
        return flat(module)

    one, other = (run_ranks(2, rank, last) for last in (False, True))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(one, other, strict=True))


@every
def test_switching_begins_with_the_mean(case: Case) -> None:
    """An algorithm on gradients takes over the mean of all ranks, not the parameters of one."""

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        module = Odd()
        model, optimizer = made(case, module, communicator)
        train(model, optimizer, communicator.rank, range(3))
        before = flat(module)
        other = model.switch_to(ByteGrad)
        after = flat(module)
        assert other.stats().steps == 3
        other(batch(communicator.rank, 3)).square().mean().backward()
        optimizer.step()
        other.close()
        return before, after

    everyone = run_ranks(3, rank)
    mean = mean_of([before for before, _ in everyone])
    for _, after in everyone:
        assert torch.equal(after, everyone[0][1])
        assert (after - mean).abs().max() <= 1e-6 * mean.abs().max()


@every
def test_close_leaves_a_plain_module(case: Case) -> None:
    """Hooks and threads go, the module trains by itself, and the wrapper evaluates only."""

    def rank(communicator: Communicator) -> None:
        module = Odd()
        model, optimizer = made(case, module, communicator)
        train(model, optimizer, communicator.rank, range(2))
        model.close()
        assert not module._forward_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        assert not optimizer._optimizer_step_pre_hooks
        with pytest.raises(RuntimeError, match="was closed"):
            model(batch(0, 0))
        model.eval()
        model(batch(0, 0))
        module(batch(communicator.rank, 0)).square().mean().backward()
        optimizer.step()
        assert copy.deepcopy(model)(batch(0, 0)).isfinite().all()

    before = set(threading.enumerate())
    run_ranks(3, rank)
    assert {thread for thread in threading.enumerate() if thread not in before} == set()


@every
def test_stats_count_steps_and_bytes(case: Case) -> None:
    def rank(communicator: Communicator) -> None:
        model, optimizer = made(case, Odd(), communicator, interval=2)
        sent = []
        for step in range(6):
            train(model, optimizer, communicator.rank, range(step, step + 1))
            sent.append(model.stats().bytes_sent)
        assert model.stats().steps == 6
        grown = [b > a for a, b in zip([0, *sent], sent, strict=False)]
        # A model that the next round needs may be sent ahead.
        assert sum(grown) in (3, 4)
        model.close()

    run_ranks(3, rank)


@grid(cover=1, name=list(CASES))
def test_bytes_per_step(name: str) -> None:
    """A rank sends its vector once to each neighbour: 4 bytes per element, and no more than 100 bytes beside it."""

    def rank(communicator: Communicator) -> int:
        module = nn.Linear(64, 64, bias=False)
        model, optimizer = made(CASES[name], module, communicator)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(communicator.rank, step, 64)).square().mean().backward()
            optimizer.step()
        model.wait()
        sent = model.stats().bytes_sent
        model.close()
        return sent

    everyone = run_ranks(4, rank)
    for r, sent in enumerate(everyone):
        out = len(CASES[name].peers(4).neighbours_out(r))
        # D-PSGD may have begun to send what the next step mixes.
        assert 3 * 4 * 64 * 64 * out <= sent <= (4 if name == "decentralized" else 3) * (4 * 64 * 64 + 100) * out
