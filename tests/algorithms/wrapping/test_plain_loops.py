"""Plain training loops as users have them, in the styles of nanoGPT and nanochat, with an algorithm in place of DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from bagua_kernels.algorithms import Algorithm, from_spec
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import Odd, batch
from tests.grids import grid

RANKS, STEPS, MICRO, CLIP = 2, 5, 3, 0.3
INTERVAL = 2  # steps; the last round of a run is not complete
SPECS = ["allreduce", "bytegrad", f"diloco:interval={INTERVAL}"]

Inputs = Callable[[int], torch.Tensor]
Wrap = Callable[[nn.Module, torch.optim.Optimizer], nn.Module]
Loop = Callable[[Wrap, Inputs, int, bool], nn.Module]


class Plain(nn.Module):
    """Stands for `DistributedDataParallel` of one rank: its names, without an exchange."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.require_backward_grad_sync = module, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.module(x)
        return found

    def set_requires_gradient_sync(self, value: bool) -> None:
        self.require_backward_grad_sync = value


def nano_gpt(wrap: Wrap, inputs: Inputs, micro_steps: int, scaled: bool) -> nn.Module:
    """The optimizer is that of the raw model, an attribute switches the exchange, and a scaler stands around clipping."""
    raw_model = Odd()
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
    decayed = [p for p in raw_model.parameters() if p.requires_grad and p.dim() >= 2]
    others = [p for p in raw_model.parameters() if p.requires_grad and p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    model: Any = wrap(raw_model, optimizer)
    assert model.module is raw_model
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        for micro in range(micro_steps):
            model.require_backward_grad_sync = micro == micro_steps - 1
            loss = model(inputs(step * MICRO + micro)).square().mean() / micro_steps
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return model


def nano_chat(wrap: Wrap, inputs: Inputs, micro_steps: int, scaled: bool) -> nn.Module:
    """A method switches the exchange, rates and momentum follow a schedule, and the model itself clears its gradients."""
    net = Odd()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05, momentum=0.85, nesterov=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    model: Any = wrap(net, optimizer)
    for step in range(STEPS):
        for micro in range(micro_steps):
            model.set_requires_gradient_sync(micro == micro_steps - 1)
            loss = model(inputs(step * MICRO + micro)).square().mean()
            (loss / micro_steps).backward()
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 - step / STEPS)
            group["momentum"] = 0.85 + 0.02 * step
        optimizer.step()
        model.zero_grad(set_to_none=True)
    return model


class Trained(NamedTuple):
    """What a rank has at the end of a loop."""

    own: dict[str, torch.Tensor]
    saved: dict[str, torch.Tensor]
    steps: int
    rounds: int
    sent: int


def trained(c: Communicator, spec: str, loop: Loop, micro_steps: int, scaled: bool) -> Trained:
    def wrap(net: nn.Module, optimizer: torch.optim.Optimizer) -> Algorithm:
        return from_spec(spec, net, optimizer, communicator=c)

    model = loop(wrap, lambda number: batch(c.rank, number), micro_steps, scaled)
    assert isinstance(model, Algorithm)
    own, stats = copied(model.module.state_dict()), model.stats()
    model.synchronize()
    saved = copied(model.module.state_dict())
    model.close()
    return Trained(own, saved, stats.steps, stats.rounds, stats.bytes_sent)


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@grid(spec=SPECS, loop__scaled=[(nano_gpt, False), (nano_gpt, True), (nano_chat, False)])
def test_ranks_end_with_equal_bits(spec: str, loop: Loop, scaled: bool) -> None:
    """Each step exchanges once, and the checkpoint fits the raw network."""
    first, second = run_ranks(RANKS, trained, spec, loop, MICRO, scaled)
    local = spec.startswith("diloco")
    assert equal(first.saved, second.saved)
    assert equal(first.own, second.own) != local, "in the middle of a round ranks have their own"
    raw = Odd(seed=5)
    assert list(first.saved) == list(raw.state_dict())
    raw.load_state_dict(first.saved)
    assert equal(first.saved, raw.state_dict())
    # A run without micro-batches has as many exchanges, of as many bytes.
    once = run_ranks(RANKS, trained, spec, loop, 1, scaled)
    for found, expected in zip((first, second), once, strict=True):
        assert (found.steps, found.rounds) == (STEPS, STEPS // INTERVAL if local else 0)
        assert found.sent == expected.sent > 0


@grid(loop__scaled=[(nano_gpt, False), (nano_gpt, True), (nano_chat, False)])
def test_the_exact_mean_is_plain_training_on_all_samples(loop: Loop, scaled: bool) -> None:
    """One process that has the samples of both ranks ends with the same parameters, within rounding."""
    plain = loop(
        lambda net, _: Plain(net), lambda number: torch.cat([batch(r, number) for r in range(RANKS)]), MICRO, scaled
    )
    expected = Odd()
    expected.load_state_dict({name.removeprefix("module."): value for name, value in plain.state_dict().items()})
    assert not equal(expected.state_dict(), Odd().state_dict())
    for found in run_ranks(RANKS, trained, "allreduce", loop, MICRO, scaled):
        torch.testing.assert_close(found.saved, dict(expected.state_dict()), rtol=1e-4, atol=1e-5)
