"""QAdam and 1-bit Adam: both phases against NumPy, and when the second begins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import GradientAllReduce
from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce
from bagua_kernels.algorithms.exchanges import momentum
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.adam.simulation import (
    BETAS,
    CODES,
    CORRECTIONS,
    KINDS,
    Given,
    Kind,
    OneBit,
    assert_close,
    both,
    draw,
    drawn,
    may_be_frozen,
    parameters,
    simulate,
)
from tests.algorithms.ranks import Odd, batch, fill
from tests.grids import grid


def run(
    communicator: Communicator,
    *,
    kind: Kind,
    steps: int,
    shapes: dict[str, tuple[int, ...]],
    **arguments: Any,
) -> list[dict[str, torch.Tensor]]:
    """The parameters after each step."""
    model = kind(Given(**shapes), communicator=communicator, **arguments)
    found = []
    for step in range(steps):
        model.optimizer.zero_grad()
        model(**{name: draw(step, communicator.rank, shape, name) for name, shape in shapes.items()}).backward()
        model.optimizer.step()
        found.append(parameters(model.module))
    return found


@may_be_frozen
@grid(
    corrected=CORRECTIONS,
    decay=[0.0, 0.1],
    size=[2, 3, 4],
    kind=KINDS,
    cover=1,
)
def test_both_phases_are_those_of_the_paper(kind: Kind, size: int, decay: float, corrected: dict[str, str]) -> None:
    """Every step, so that none is lost at the freeze either; and with the bits of rank 0 on all ranks."""
    shapes, steps, freeze = {"w": (32, 40), "bias": (70,), "other": (256, 3)}, 14, 5
    arguments = {"freeze_step": freeze, "lr": 0.01, "weight_decay": decay, "exact": "1d", "bucket_bytes": 2000}
    arguments |= {"betas": BETAS, **corrected}
    everyone = run_ranks(size, partial(run, kind=kind, steps=steps, shapes=shapes, **arguments))
    start = parameters(Given(**shapes))
    for name, shape in shapes.items():
        first = start[name].numpy().reshape(-1)
        code, exact = CODES[kind](size, first.size), len(shape) == 1
        local = drawn(steps, size, shape, name)
        settings = {"lr": 0.01, "betas": BETAS, "decay": decay, "exact": exact, **corrected}
        expected = simulate(code, local, first, freeze, **settings)
        for step in range(steps):
            assert_close(everyone[0][step][name], expected[step], (name, step))
            assert all(torch.equal(ranks[step][name], everyone[0][step][name]) for ranks in everyone)


@grid(size=[2, 3, 4], kind=KINDS, cover=1)
def test_before_the_freeze_it_is_adam_on_mean_gradients(kind: Kind, size: int) -> None:
    def rank(communicator: Communicator) -> dict[str, torch.Tensor]:
        model = kind(Odd(communicator.rank), communicator=communicator, lr=0.01, freeze_step=6)
        for step in range(6):
            model.optimizer.zero_grad()
            model(batch(communicator.rank, step)).square().mean().backward()
            model.optimizer.step()
        return parameters(model.module)

    everyone = run_ranks(size, rank)
    plain = Odd()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        torch.stack([plain(batch(r, step)).square().mean() for r in range(size)]).mean().backward()
        optimizer.step()
    for name, p in plain.named_parameters():
        assert torch.allclose(everyone[0][name], p, rtol=1e-6, atol=2e-6)
        assert all(torch.equal(everyone[0][name], other[name]) for other in everyone)


@both
def test_groups_have_betas_of_their_own(kind: Kind) -> None:
    shapes, steps, freeze, ranks = {"a": (16, 16), "b": (16, 32)}, 10, 4, 2
    options = {"a": {"betas": (0.8, 0.95), "lr": 0.02}, "b": {"betas": (0.95, 0.9), "eps": 1e-3}}

    def rank(communicator: Communicator) -> list[dict[str, torch.Tensor]]:
        def wrap(module: nn.Module, **arguments: Any) -> MomentumAllReduce:
            groups = [{"params": [p], **options[name]} for name, p in module.named_parameters()]
            return kind(module, params=groups, **arguments)

        return run(communicator, kind=wrap, steps=steps, shapes=shapes, freeze_step=freeze, lr=0.01)

    ours = run_ranks(ranks, rank)[0]
    for name, shape in shapes.items():
        first = parameters(Given(**shapes))[name].numpy().reshape(-1)
        code = CODES[kind](ranks, first.size)
        expected = simulate(code, drawn(steps, ranks, shape, name), first, freeze, **{"lr": 0.01, **options[name]})
        for step in range(steps):
            assert_close(ours[step][name], expected[step], (name, step))


@may_be_frozen
@grid(
    corrected=CORRECTIONS,
    size=[1, 2, 3],
    kind=KINDS,
    cover=1,
)
def test_effective_learning_rate(kind: Kind, size: int, corrected: dict[str, str]) -> None:
    """A constant gradient, of one magnitude, which codecs keep: Adam moves every element by the learning rate.

    After the freeze, the bias correction says by how much more; one rank never freezes.
    """

    def rank(communicator: Communicator) -> None:
        model = kind(
            Given(w=(16, 16)),
            communicator=communicator,
            lr=0.01,
            freeze_step=10,
            eps=1e-12,
            betas=(0.9, 0.99),
            **corrected,
        )
        signs = draw(0, 0, (16, 16)).sign()
        for step in range(60):
            before = parameters(model.module)["w"]
            model.optimizer.zero_grad()
            model(w=0.3 * signs).backward()
            model.optimizer.step()
            moved = before - parameters(model.module)["w"]
            now = {"none": 1.0, "frozen": 1 - 0.99**10, "continued": 1 - 0.99 ** (step + 1)}
            longer = 1.0
            if step >= 10 and size > 1:
                longer = (now[corrected.get("v_correction", "continued")] / now["frozen"]) ** 0.5
            assert torch.allclose(moved, 0.01 * longer * signs, rtol=0, atol=6e-6), (step, moved)
        assert model.optimizer.frozen is (size > 1)

    run_ranks(size, rank)


@both
def test_one_rank_is_adam_for_ever(kind: Kind) -> None:
    def rank(communicator: Communicator) -> dict[str, torch.Tensor]:
        model = kind(Odd(), communicator=communicator, freeze_step=3)
        for step in range(8):
            model.optimizer.zero_grad()
            model(batch(0, step)).square().mean().backward()
            model.optimizer.step()
        return parameters(model.module)

    (ours,) = run_ranks(1, rank)
    plain = Odd()
    optimizer = torch.optim.Adam(plain.parameters())
    for step in range(8):
        optimizer.zero_grad()
        plain(batch(0, step)).square().mean().backward()
        optimizer.step()
    for name, p in plain.named_parameters():
        assert torch.allclose(ours[name], p, rtol=1e-6, atol=1e-6)


@both
def test_bytes_fall_after_the_freeze(kind: Kind) -> None:
    def rank(communicator: Communicator) -> list[int]:
        model = kind(Given(w=(256, 256)), communicator=communicator, freeze_step=2)
        sent = [0]
        for step in range(4):
            model(w=draw(step, communicator.rank, (256, 256))).backward()
            model.optimizer.step()
            sent.append(model.stats().bytes_sent)
        return list(np.diff(sent))

    dense, last_dense, first, second = run_ranks(2, rank)[0]
    assert dense == last_dense
    assert first == second < dense * (0.05 if kind is OneBit else 0.27)


@both
def test_auto_freezes_everywhere_at_once(kind: Kind) -> None:
    """Not before two time constants of v, not while v changes, and as rank 0 says."""

    def rank(communicator: Communicator) -> tuple[int, list[float]]:
        model = kind(Given(w=(32, 32)), communicator=communicator, freeze_step="auto", betas=(0.9, 0.9))
        told = model.optimizer.agree
        # A rank that finds something else still goes by rank 0.
        model.optimizer.agree = lambda stable: told(stable if communicator.rank == 0 else not stable)
        for step in range(200):
            model.optimizer.zero_grad()
            model(w=draw(step, communicator.rank, (32, 32)) * (1 + 9 * 0.95**step)).backward()
            model.optimizer.step()
            if model.optimizer.frozen:
                break
        return step + 1, parameters(model.module)["w"].tolist()

    everyone = run_ranks(3, rank)
    assert everyone[0] == everyone[1] == everyone[2]
    assert 40 < everyone[0][0] < 150


@grid(dtype=[torch.float64, torch.bfloat16], kind=KINDS, cover=1)
def test_other_dtypes(kind: Kind, dtype: torch.dtype) -> None:
    def rank(communicator: Communicator) -> tuple[float, float, list[torch.Tensor]]:
        model = kind(Odd().to(dtype), communicator=communicator, lr=0.01, freeze_step=10)
        losses = []
        for step in range(40):
            model.optimizer.zero_grad()
            loss = model(batch(communicator.rank, step % 2).to(dtype)).square().mean()
            loss.backward()
            model.optimizer.step()
            losses.append(float(loss.detach()))
        return losses[0], losses[-2], [p.detach() for p in model.parameters()]

    everyone = run_ranks(2, rank)
    assert everyone[0][1] < 0.5 * everyone[0][0]
    assert all(torch.equal(a, b) for a, b in zip(everyone[0][2], everyone[1][2], strict=True))


@both
def test_pieces_and_memory_formats_change_nothing(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are worked on in pieces of some rows, and their memory may be in another order."""

    def rank(communicator: Communicator) -> dict[str, torch.Tensor]:
        module = nn.ModuleDict({"conv": nn.Conv2d(3, 8, 3), "odd": Odd()})
        fill(module)
        module.to(memory_format=torch.channels_last)
        model = kind(module, communicator=communicator, freeze_step=3)
        for step in range(8):
            model.optimizer.zero_grad()
            x = batch(communicator.rank, step, 3 * 5 * 5).view(4, 3, 5, 5)
            y = batch(communicator.rank, step)
            (module["conv"](x).square().mean() + module["odd"](y).square().mean()).backward()
            assert module["conv"].weight.grad.stride() == module["conv"].weight.stride()
            model.optimizer.step()
        return parameters(module)

    whole = run_ranks(2, rank)
    monkeypatch.setattr(momentum, "_PIECE", 50)
    cut = run_ranks(2, rank)
    for name, value in whole[0].items():
        assert value.isfinite().all()
        assert all(torch.equal(value, other[name]) for other in (whole[1], *cut))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Ten classes of 8x8 pixels, of which 3 are always 0 and 3 almost always, as in scikit-learn's digits."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, 8000)
    pixels = np.maximum(random.normal(0, 1, (10, 64))[labels] + random.normal(0, 2.5, (8000, 64)), 0)
    pixels[:, :3] = 0
    pixels[:, 3:6] *= random.random((8000, 3)) < 0.01
    return torch.from_numpy(pixels.astype(np.float32)), torch.from_numpy(labels)


def training_loss(communicator: Communicator, steps: int, wrap: Callable[..., tuple[nn.Module, Any]]) -> float:
    pixels, labels = images()
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    fill(module)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(-0.1).mul_(0.3)
    model, optimizer = wrap(module, communicator)
    for step in range(steps):
        generator = torch.Generator().manual_seed(101 * step + communicator.rank)
        chosen = torch.randint(len(pixels), (16,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pixels[chosen]), labels[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(module(pixels), labels))


def dense(module: nn.Module, communicator: Communicator) -> tuple[nn.Module, Any]:
    return GradientAllReduce(module, communicator=communicator), torch.optim.Adam(module.parameters())


# Fewer steps do not tell a method that trains from one that hardly does.
@pytest.mark.slow
@pytest.mark.parametrize("steps", [300, 2000])
def test_trains_as_well_as_adam(steps: int) -> None:
    expected = run_ranks(4, training_loss, steps, dense)[0]
    assert expected < 1.0
    for kind in KINDS.values():

        def wrap(module: nn.Module, communicator: Communicator, kind: Kind = kind) -> tuple[nn.Module, Any]:
            model = kind(module, communicator=communicator, freeze_step=steps // 5)
            return model, model.optimizer

        losses = run_ranks(4, training_loss, steps, wrap)
        print(losses[0], expected)
        assert len(set(losses)) == 1
        assert losses[0] <= 1.1 * expected + 1e-3
