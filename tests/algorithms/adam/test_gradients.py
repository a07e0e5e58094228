"""Gradients of QAdam and 1-bit Adam that are accumulated, skipped, weighted, clipped or lacking."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce
from bagua_kernels.algorithms.adam.qadam import QAdam
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.adam.simulation import (
    BETAS,
    CODES,
    KINDS,
    Given,
    Kind,
    assert_close,
    both,
    draw,
    drawn,
    parameters,
    simulate,
)
from tests.algorithms.ranks import batch, fill
from tests.grids import grid


@both
@grid(cover=1, synchronous=[True, False])
def test_accumulated_gradients(kind: Kind, synchronous: bool) -> None:
    """Three backward passes a step, of which one or all are exchanged: one update with their sum.

    With all exchanged, momentum is encoded three times; so the gradients are ones that codecs keep.
    """
    shape, steps, freeze, ranks = (16, 16), 8, 4, 2

    def gradient(step: int, micro: int, rank: int) -> torch.Tensor:
        if synchronous:
            return (0.1 + 0.02 * micro + 0.1 * rank + 0.01 * step) * draw(0, 0, shape).sign()
        return draw(3 * step + micro, rank, shape)

    def rank(communicator: Communicator) -> torch.Tensor:
        model = kind(Given(w=shape), communicator=communicator, lr=0.01, freeze_step=freeze, betas=BETAS)
        for step in range(steps):
            model.optimizer.zero_grad()
            for micro in range(3):
                with contextlib.nullcontext() if synchronous or micro == 2 else model.no_sync():
                    model(w=gradient(step, micro, communicator.rank)).backward()
            model.optimizer.step()
        assert model.stats().steps == steps * (3 if synchronous else 1)
        return parameters(model.module)["w"]

    first, second = run_ranks(ranks, rank)
    assert torch.equal(first, second)
    start = parameters(Given(w=shape))["w"].numpy().reshape(-1)
    sums = np.stack(
        [
            [sum(gradient(s, k, r).numpy().reshape(-1).astype(np.float64) for k in range(3)) for r in range(ranks)]
            for s in range(steps)
        ]
    )
    expected = simulate(CODES[kind](ranks, start.size), sums, start, freeze, lr=0.01, betas=BETAS)
    assert_close(first, expected[-1], "end")


@both
@grid(cover=1, infinite={"all taken": set(), "some skipped": {1, 6}})
def test_skipped_steps_under_a_scaler_do_not_count(kind: Kind, infinite: set[int]) -> None:
    """The same as without a scaler and without these steps, whatever the scale: powers of two cost no bits."""
    shape, freeze = (32, 16), 4

    def rank(communicator: Communicator, scaled: bool) -> tuple[torch.Tensor, set[float]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=scaled)
        model = kind(Given(w=shape), communicator=communicator, lr=0.01, freeze_step=freeze, betas=BETAS, scaler=scaler)
        taken, scales = 0, set()
        for step in range(11):
            if step in infinite and not scaled:
                continue
            model.optimizer.zero_grad()
            gradient = draw(taken, communicator.rank, shape)
            if step in infinite and communicator.rank == 1:
                gradient = gradient * float("inf")
            scaler.scale(model(w=gradient)).backward()
            assert model.optimizer.frozen is (taken >= freeze)
            scaler.step(model.optimizer)
            scaler.update()
            scales.add(scaler.get_scale())
            taken += step not in infinite
        return parameters(model.module)["w"], scales

    scaled = run_ranks(2, partial(rank, scaled=True))
    plain = run_ranks(2, partial(rank, scaled=False))
    assert torch.equal(scaled[0][0], scaled[1][0])
    assert len(scaled[0][1]) > 1
    if kind is QAdam or not infinite:
        assert torch.equal(scaled[0][0], plain[0][0])
    else:
        # The finite payloads of a skipped step change what their ranks keep.
        assert (scaled[0][0] - plain[0][0]).abs().median() < 0.005


@both
def test_weights(kind: Kind) -> None:
    shape, steps, freeze, ranks = (16, 32), 9, 4, 3

    def rank(communicator: Communicator) -> torch.Tensor:
        model = kind(Given(w=shape), communicator=communicator, lr=0.01, freeze_step=freeze)
        for step in range(steps):
            model.optimizer.zero_grad()
            model.weigh(float(communicator.rank))
            model(w=draw(step, communicator.rank, shape)).backward()
            model.optimizer.step()
        return parameters(model.module)["w"]

    start = parameters(Given(w=shape))["w"].numpy().reshape(-1)
    weighted = drawn(steps, ranks, shape) * np.arange(ranks).reshape(1, -1, 1)
    expected = simulate(CODES[kind](ranks, start.size), weighted, start, freeze, lr=0.01)
    for ours in run_ranks(ranks, rank):
        assert_close(ours, expected[-1], "end")


@both
def test_a_scaler_must_be_known(kind: Kind) -> None:
    def rank(communicator: Communicator) -> None:
        model = kind(Given(w=(4, 4)), communicator=communicator)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(w=torch.ones(4, 4))).backward()
        with pytest.raises(RuntimeError, match="pass it to the algorithm's constructor as scaler="):
            scaler.step(model.optimizer)

    run_ranks(2, rank)


@both
def test_clipping(kind: Kind) -> None:
    """Before the freeze the gradient, then the momentum that it leads to."""

    def rank(communicator: Communicator) -> torch.Tensor:
        model = kind(Given(w=(32, 16)), communicator=communicator, freeze_step=3)
        for step in range(8):
            model.optimizer.zero_grad()
            model(w=draw(step, communicator.rank, (32, 16))).backward()
            frozen, unclipped = model.optimizer.frozen, model.module.w.grad.clone()
            assert model.clip_grad_norm_(1e6) > 0
            assert torch.equal(model.module.w.grad, unclipped)
            norm = model.clip_grad_norm_(0.5)
            model.optimizer.step()
            momentum = model.optimizer.state[model.module.w]["exp_avg"]
            assert momentum.norm() <= 0.5 * (1 + 1e-4)
            assert not frozen or norm < unclipped.norm()
        with pytest.raises(ValueError, match="only Euclidean norms"):
            model.clip_grad_norm_(1.0, norm_type=1.0)
        return momentum

    first, second = run_ranks(2, rank)
    assert torch.equal(first, second)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(7, 40)
        self.right = nn.Linear(7, 40)
        self.late = nn.Linear(7, 40)
        fill(self)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        return getattr(self, branch)(x)


@both
def test_parameters_without_gradient(kind: Kind) -> None:
    """In some steps, on some ranks, or before the freeze: what then comes first stays put."""

    def rank(communicator: Communicator) -> dict[str, torch.Tensor]:
        model = kind(Branches(), communicator=communicator, freeze_step=4, bucket_bytes=500)
        for step in range(12):
            branch = "late" if step > 8 else "left" if (step + communicator.rank) % 3 else "right"
            model.optimizer.zero_grad()
            model(batch(communicator.rank, step), branch).square().mean().backward()
            model.optimizer.step()
        return parameters(model.module)

    everyone = run_ranks(3, rank)
    start = parameters(Branches())
    for name, value in everyone[0].items():
        assert value.isfinite().all()
        assert torch.equal(value, start[name]) is name.startswith("late")
        assert all(torch.equal(value, other[name]) for other in everyone)


@grid(scaled=[False, True], bucket_bytes=[1, 10 << 20], kind=KINDS)
def test_nothing_is_lost_of_a_parameter_that_no_rank_used(kind: Kind, bucket_bytes: int, scaled: bool) -> None:
    """Adam skips it, so that what its payloads moved is still to come."""
    shapes, freeze, steps, ranks = {"a": (16, 32), "b": (13, 31), "c": (16, 32)}, 3, 12, 2

    def rank(communicator: Communicator) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        more = {"error_feedback": True, "bucket_bytes": bucket_bytes, "limit": float("inf"), "scaler": scaler}
        model = kind(Given(**shapes), communicator=communicator, freeze_step=freeze, **more)
        applied = {name: torch.zeros(shape) for name, shape in shapes.items()}
        for step in range(steps):
            model.optimizer.zero_grad()
            used = [name for name in shapes if step < freeze or name == "a" or step % 3 == 1]
            scaler.scale(model(**{name: draw(step, communicator.rank, shapes[name], name) for name in used})).backward()
            for name, p in model.module.named_parameters():
                assert (p.grad is not None) == (name in used)
                if step >= freeze and p.grad is not None:
                    applied[name] += p.grad / scaler.get_scale()
            scaler.step(model.optimizer)
            scaler.update()
        return applied, model.algorithm_state_dict()["vectors"]

    everyone = run_ranks(ranks, rank)
    for name, shape in shapes.items():
        produced = torch.zeros(shape)
        for step in range(freeze, steps):
            if name == "a" or step % 3 == 1:
                produced += sum(draw(step, r, shape, name) for r in range(ranks)) / ranks
        workers = sum(vectors["worker"][name] for _, vectors in everyone) / ranks
        kept = (workers + everyone[0][1]["owner"][name]).view(shape)
        assert kept.norm() > 0
        # Residuals are of momentum, of which a gradient is a tenth.
        found, expected = 0.1 * everyone[0][0][name] + kept, 0.1 * produced
        assert (found - expected).norm() < 1e-5 * expected.norm()


def test_residuals_of_unused_parameters_outlive_the_end_of_compression() -> None:
    """They are handed over to the first step without compression in which a rank uses the parameter."""
    shapes, freeze, ends, steps, ranks = {"a": (16, 32), "b": (13, 31)}, 3, 7, 11, 2

    def rank(communicator: Communicator) -> tuple[torch.Tensor, list[float]]:
        model = MomentumAllReduce(
            Given(**shapes),
            communicator=communicator,
            freeze_step=freeze,
            codec={0: "absmax_int4", ends: None},
            error_feedback=True,
            limit=float("inf"),
        )
        applied, kept = torch.zeros(shapes["b"]), []
        for step in range(steps):
            model.optimizer.zero_grad()
            used = ["a"] if ends <= step < ends + 2 else ["a", "b"]
            model(**{name: draw(step, communicator.rank, shapes[name], name) for name in used}).backward()
            if step >= freeze and model.module.b.grad is not None:
                applied += model.module.b.grad
            vectors = model.algorithm_state_dict()["vectors"]
            kept.append(sum(float(named["b"].norm()) for named in vectors.values() if "b" in named))
            model.optimizer.step()
        return applied, kept

    (applied, kept), _ = run_ranks(ranks, rank)
    assert all(kept[freeze : ends + 2]), kept
    assert not any(kept[ends + 2 :]), kept
    used = [step for step in range(freeze, steps) if not ends <= step < ends + 2]
    expected = sum(draw(step, r, shapes["b"], "b") for step in used for r in range(ranks)) / ranks
    assert (applied - expected).norm() < 1e-5 * expected.norm()
