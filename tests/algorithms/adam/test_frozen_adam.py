"""The optimizer of QAdam and 1-bit Adam: Adam until its second moment freezes, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from bagua_kernels.algorithms.adam.frozen_adam import FrozenAdam
from bagua_kernels.algorithms.adam.onebit_adam import OneBitAdam
from bagua_kernels.algorithms.adam.qadam import QAdam
from bagua_kernels.algorithms.specs import from_spec
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.adam.simulation import CORRECTIONS, Given, draw, may_be_frozen
from tests.algorithms.ranks import Odd, batch
from tests.grids import grid

every_correction = grid(cover=1, corrected=CORRECTIONS)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_optimizer_is_adam_until_the_freeze(decay: float) -> None:
    models = Odd(), Odd()
    kind = torch.optim.AdamW if decay else torch.optim.Adam
    ours = FrozenAdam(models[0].parameters(), lr=0.01, weight_decay=decay, freeze_step=20)
    theirs = kind(models[1].parameters(), lr=0.01, weight_decay=decay)
    for step in range(20):
        assert not ours.frozen
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            optimizer.zero_grad()
            model(batch(0, step)).square().mean().backward()
            optimizer.step()
        for a, b in zip(*(m.parameters() for m in models), strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)
    assert ours.frozen


def test_optimizer_takes_adams_state() -> None:
    models = Odd(), Odd()
    theirs = torch.optim.AdamW(models[0].parameters(), lr=0.01, weight_decay=0.0)
    for step in range(3):
        theirs.zero_grad()
        models[0](batch(0, step)).square().mean().backward()
        theirs.step()
    models[1].load_state_dict(models[0].state_dict())
    ours = FrozenAdam(models[1].parameters(), freeze_step=5)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for step, frozen in ((3, False), (4, True)):
        for model, optimizer in zip(models, (theirs, ours), strict=True):
            optimizer.zero_grad()
            model(batch(0, step)).square().mean().backward()
            optimizer.step()
        assert ours.frozen is frozen
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)


@grid(then__now=[(4, 4), (4, 3), (2, 6)], common=[0.0, 0.5, 20.0])
def test_a_frozen_moment_counts_as_that_of_other_ranks(then: int, now: int, common: float) -> None:
    """The variance of a mean is in inverse proportion to the number of ranks, and not its square. A copy takes the same step."""
    model = Given(w=(3, 5))
    optimizer = FrozenAdam(model.parameters(), lr=0.1, freeze_step=2, v_correction="none")
    optimizer.ranks = then
    generator = torch.Generator().manual_seed(0)
    gradients = [common + torch.randn(3, 5, generator=generator) for _ in range(3)]
    for g in gradients[:2]:
        model.w.grad = g.clone()
        optimizer.step()
    optimizer.ranks = now
    other = copy.deepcopy(optimizer)
    before = model.w.detach().double()
    model.w.grad = gradients[2].clone()
    optimizer.step()
    beta1, beta2 = 0.9, 0.999
    v, m = torch.zeros(3, 5).double(), torch.zeros(3, 5).double()
    for number, g in enumerate(gradients):
        m = beta1 * m + (1 - beta1) * g.double()
        v = beta2 * v + (1 - beta2) * g.double() ** 2 if number < 2 else v
        if number == 1:
            ratio = (m / (1 - beta1**2)).square().sum() / (v / (1 - beta2**2)).sum()
            # Of a mean of two with weights 9 and 10 of 19, or about that.
            noise = sum(w**2 for w in (beta1, 1.0)) / (beta1 + 1.0) ** 2
            signal = float(((ratio - noise) / (1 - noise)).clamp(0, 1))
    v = v * (signal + (1 - signal) * then / now)
    expected = before - 0.1 * (m / (1 - beta1**3)) / (v.sqrt() + 1e-8)
    torch.testing.assert_close(model.w.detach().double(), expected, rtol=1e-5, atol=1e-6)
    copied = other.param_groups[0]["params"][0]
    copied.grad = gradients[2].clone()
    other.step()
    assert torch.equal(copied, model.w)


@may_be_frozen
@every_correction
def test_optimizer_can_be_copied(corrected: dict[str, Any]) -> None:
    model = Given(w=(4, 4))
    optimizer = FrozenAdam(model.parameters(), freeze_step=2, **corrected)
    model(w=torch.ones(4, 4)).backward()
    optimizer.step()
    optimizer.agree = lambda _: pytest.fail("a copy asks nobody")
    other = copy.deepcopy(optimizer)
    p = other.param_groups[0]["params"][0]
    p.grad = torch.ones(4, 4)
    other.step()
    assert other.frozen
    assert not optimizer.frozen
    v = other.state[p]["exp_avg_sq"]
    # The squares of two gradients, of 1 each.
    assert torch.allclose(v, torch.tensor(1.0 if corrected == {"v_correction": "frozen"} else 0.001999))


@may_be_frozen
@every_correction
def test_frozen_v_keeps_its_bits(corrected: dict[str, Any]) -> None:
    model = Given(w=(8, 8))
    optimizer = FrozenAdam(model.parameters(), freeze_step=3, **corrected)
    seen = []
    for step in range(8):
        optimizer.zero_grad()
        model(w=draw(step, 0, (8, 8))).backward()
        optimizer.step()
        seen.append(optimizer.state[model.w]["exp_avg_sq"].clone())
    assert all(torch.equal(seen[2], later) for later in seen[3:])
    gradients = torch.stack([draw(step, 0, (8, 8)).double() for step in range(3)])
    weights = torch.tensor([0.999**2, 0.999, 1.0], dtype=torch.float64)
    weights *= 1 / weights.sum() if corrected == {"v_correction": "frozen"} else 0.001
    expected = (gradients.square() * weights.view(-1, 1, 1)).sum(0)
    assert torch.allclose(seen[-1].double(), expected, rtol=1e-5)


def test_a_correction_of_earlier_trainings_warns_once_and_stays_with_their_states() -> None:
    """Where it is passed, through all constructors; neither copies nor loaded states warn."""

    def rank(communicator: Communicator) -> None:
        model = QAdam(Given(w=(4, 4)), v_correction="frozen", communicator=communicator)
        copied = copy.deepcopy(model.optimizer)
        loaded = FrozenAdam(Given(w=(4, 4)).parameters())
        loaded.load_state_dict(model.optimizer.state_dict())
        for each in (model.optimizer, copied, loaded):
            assert each.param_groups[0]["v_correction"] == "frozen"

    with pytest.warns(DeprecationWarning, match="leave it out in new ones") as caught:
        run_ranks(1, rank)
    assert [each.filename for each in caught] == [__file__]


def test_auto_waits_for_two_time_constants() -> None:
    model = Given(w=(4, 4))
    optimizer = FrozenAdam(model.parameters(), betas=(0.9, 0.98), freeze_step="auto")
    for _ in range(99):
        optimizer.zero_grad()
        model(w=torch.ones(4, 4)).backward()
        optimizer.step()
    assert not optimizer.frozen
    # What a look remembers is part of the state.
    again = FrozenAdam(model.parameters(), betas=(0.9, 0.98), freeze_step="auto")
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (optimizer, again):
        one.step()
        assert one.frozen


def test_refusals() -> None:
    def rank(communicator: Communicator) -> None:
        module = Odd()
        with pytest.raises(TypeError, match="QAdam makes its optimizer itself, got SGD"):
            QAdam(module, torch.optim.SGD(module.parameters()), communicator=communicator)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="freeze_step is the step with which"):
            OneBitAdam(module, warmup_steps=3, communicator=communicator)
        with pytest.raises(ValueError, match=r"'second.weight' of shape \(13, 31\) is in no group"):
            OneBitAdam(module, params=[*module.first.parameters(), module.scale], communicator=communicator)
        with pytest.raises(ValueError, match="mask of 'scale' has shape"):
            OneBitAdam(module, mask={"scale": torch.ones(2)}, communicator=communicator)
        with pytest.raises(ValueError, match="mask of 'frozen' has shape"):
            OneBitAdam(module, mask={"frozen": torch.ones(5)}, communicator=communicator)
        with pytest.raises(ValueError, match="limit must be above 0"):
            QAdam(module, limit=0.0, communicator=communicator)
        with pytest.raises(ValueError, match=r"v_correction must be one of \('continued', 'none'\), got 'yes'"):
            QAdam(module, v_correction="yes", communicator=communicator)
        with pytest.raises(ValueError, match="freeze_step must be"):
            QAdam(module, freeze_step=0, communicator=communicator)
        with pytest.raises(ValueError, match="Invalid beta parameter at index 1"):
            QAdam(module, params=[{"params": module.parameters(), "betas": (0.9, 1.0)}], communicator=communicator)
        model = from_spec("onebit_adam:freeze_step=7,block=64", module, communicator=communicator)
        assert isinstance(model, OneBitAdam)
        assert model.optimizer.freeze_step == 7
        with pytest.raises(ValueError, match="OneBitAdam cannot go on"), model.join():
            pass

    run_ranks(2, rank)
