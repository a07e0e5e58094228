"""What a training loop may do beside plain steps: join, scale, clip, accumulate, schedule, with any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.gossip.common import ALL, CASES, Case, Quadratic, Task, error, falling, flat, simulated
from tests.algorithms.ranks import Odd, batch, gradients, loss_of
from tests.grids import grid
from tests.oracles.gossip import SGD

TOLERANCE = 1e-6
every = grid(cover=1, case=ALL)


def joined(case: Case, batches: Sequence[int], more: int, **options: Any) -> np.ndarray:
    """Trains ranks with different numbers of batches, then all together; returns the parameters in the end."""

    def rank(communicator: Communicator) -> tuple[torch.Tensor, int]:
        module = Quadratic()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.25)
        model = case.make(module, optimizer, communicator, **options)
        task = Task(flat(module).numel())

        def take(step: int) -> None:
            optimizer.zero_grad()
            task.loss(model, communicator.rank, step).backward()
            optimizer.step()

        with model.join():
            for step in range(batches[communicator.rank]):
                take(step)
        for step in range(max(batches), max(batches) + more):
            take(step)
        model.wait()
        steps = model.stats().steps
        model.close()
        return flat(module), steps

    everyone = run_ranks(len(batches), rank)
    assert [steps for _, steps in everyone] == [max(batches) + more] * len(batches)
    return np.stack([x.double().numpy() for x, _ in everyone])


@grid(case=CASES, batches=[(1, 2, 3), (5, 1), (3, 0, 4, 4), (2, 2, 2)], more=[0, 2], cover=1)
def test_join_lets_ranks_that_are_through_mix(case: Case, batches: Sequence[int], more: int) -> None:
    """A rank without a batch takes no step, and mixes what it has until all are through."""
    skips = frozenset((r, step) for r, n in enumerate(batches) for step in range(n, max(batches)))
    found, steps = joined(case, batches, more), max(batches) + more
    start = flat(Quadratic()).double().numpy()
    task = Task(len(start), skips=skips)
    simulation = case.simulation(start, case.peers(len(batches)).matrix, task.gradient, SGD(lambda step: 0.25))
    for _ in range(steps):
        simulation.step()
    assert np.abs(found - simulation.x).max() <= TOLERANCE * np.abs(simulation.x).max()


@every
def test_join_with_codecs_and_intervals_ends(case: Case) -> None:
    assert np.isfinite(joined(case, (4, 1, 7), 3, interval=2)).all()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"torch": torch.optim.SGD, "fused": optim.SGD}


@grid(case=CASES, kind=list(OPTIMIZERS), at=[0, 2], cover=1)
def test_an_overflow_on_one_rank_shifts_no_round(case: Case, kind: str, at: int) -> None:
    """A GradScaler leaves out the step of one rank alone; that rank then mixes what it has."""
    size, steps, bad = 3, 6, 1

    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], float]:
        module = Quadratic()
        optimizer = OPTIMIZERS[kind](module.parameters(), lr=falling(0))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: falling(step) / falling(0))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        model = case.make(module, optimizer, communicator, scaler=scaler)
        task = Task(flat(module).numel())
        for step in range(steps):
            optimizer.zero_grad()
            loss = task.loss(model, communicator.rank, step)
            overflow = communicator.rank == bad and step == at
            scaler.scale(loss * float("inf") if overflow else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.last_epoch = step  # a schedule's own step warns after an overflow in the first one
            optimizer.param_groups[0]["lr"] = falling(step + 1)
        model.wait()
        module.seen.append(flat(module))
        model.close()
        return module.seen, scaler.get_scale()

    everyone = run_ranks(size, rank)
    assert [scale for _, scale in everyone] == [1024.0, 512.0, 1024.0]
    found = np.stack([np.stack([x.double().numpy() for x in seen]) for seen, _ in everyone], axis=1)
    expected = simulated(case, case.peers(size), steps, skips=frozenset({(bad, at)}))
    assert error(found, expected) <= TOLERANCE


@grid(cover=1, case=CASES)
def test_a_step_that_a_rank_leaves_out(case: Case) -> None:
    """With `skip_step` instead of the optimizer's step, the rank mixes what it has, in the round of the others."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        module = Quadratic()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        model = case.make(module, optimizer, communicator)
        task = Task(flat(module).numel())
        for step in range(5):
            optimizer.zero_grad()
            task.loss(model, communicator.rank, step).backward()
            for group in optimizer.param_groups:
                group["lr"] = falling(step)
            if (communicator.rank, step) in skips:
                model.skip_step()
            else:
                optimizer.step()
        model.wait()
        module.seen.append(flat(module))
        model.close()
        return module.seen

    skips = frozenset({(1, 0), (2, 3)})
    found = np.stack([np.stack([x.double().numpy() for x in seen]) for seen in run_ranks(3, rank)], axis=1)
    assert error(found, simulated(case, case.peers(3), 5, skips=skips)) <= TOLERANCE


ALGEBRA = {
    "torch_adam": partial(torch.optim.AdamW, lr=0.01),
    "torch_sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "torch_foreach": partial(torch.optim.Adam, lr=0.01, foreach=True),
    "torch_rms": partial(torch.optim.RMSprop, lr=0.01),
    "adam": partial(optim.AdamW, lr=0.01),
    "sgd": partial(optim.SGD, lr=0.1, momentum=0.9),
    "lion": partial(optim.Lion, lr=0.01),
}


@pytest.mark.slow
@grid(case=ALL, kind=list(ALGEBRA), cover=1)
def test_optimizers_of_all_kinds(case: Case, kind: str) -> None:
    """Losses fall, states stay with their rank, and two groups with their own learning rates are two."""

    def rank(communicator: Communicator) -> tuple[float, float]:
        module = Odd()
        parameters = [p for p in module.parameters() if p.requires_grad]
        optimizer = ALGEBRA[kind]([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.005}])
        model = case.make(module, optimizer, communicator)
        losses = []
        for step in range(30):
            optimizer.zero_grad()
            loss = loss_of(model, communicator.rank, step % 3)
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
        model.close()
        return sum(losses[:3]), sum(losses[-3:])

    for first, last in run_ranks(3, rank):
        assert last < 0.7 * first


@every
def test_adams_take_the_steps_that_torch_takes(case: Case) -> None:
    """The optimizers of this package, whose steps may be fused with mixing, follow those of PyTorch."""
    exact = {"codec": "identity"} if case in (ALL["low_precision"], ALL["choco"]) else {}

    def rank(communicator: Communicator, kind: Callable[..., torch.optim.Optimizer]) -> torch.Tensor:
        module = Odd()
        optimizer = kind(module.parameters(), lr=0.01, weight_decay=0.1)
        model = case.make(module, optimizer, communicator, **exact)
        for step in range(10):
            optimizer.zero_grad()
            loss_of(model, communicator.rank, step).backward()
            optimizer.step()
        model.wait()
        model.close()
        return flat(module)

    torchs, ours = (run_ranks(3, rank, kind) for kind in (torch.optim.AdamW, optim.AdamW))
    for a, b in zip(torchs, ours, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@every
def test_clipping_is_by_the_rank_s_own_norm(case: Case) -> None:
    def rank(communicator: Communicator) -> None:
        module, plain = Odd(), Odd()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = case.make(module, optimizer, communicator)
        for step in range(3):
            optimizer.zero_grad()
            plain.zero_grad()
            loss = loss_of(model, communicator.rank, step)
            plain.load_state_dict(module.state_dict())
            loss.backward()
            norm = model.clip_grad_norm_(0.01)
            loss_of(plain, communicator.rank, step).backward()
            assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
            for a, b in zip(gradients(module), gradients(plain), strict=True):
                assert (a is None) == (b is None)
                assert a is None or torch.equal(a, b)
            optimizer.step()
        model.close()

    run_ranks(3, rank)


@grid(case=ALL, schedule=["step", "cosine"], cover=1)
def test_schedules(case: Case, schedule: str) -> None:
    """A learning rate of zero from some step on leaves mixing alone, which brings ranks together."""

    def rank(communicator: Communicator) -> tuple[float, float]:
        module = Odd()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        if schedule == "step":
            scheduler: Any = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4], gamma=0.0)
        else:
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        model = case.make(module, optimizer, communicator)
        apart = []
        for step in range(4 if schedule == "cosine" else 24):
            optimizer.zero_grad()
            loss_of(model, communicator.rank, step).backward()
            optimizer.step()
            scheduler.step()
            if step in (3, 23):
                model.wait()
                apart.append(model.consensus())
        model.close()
        return apart[0], apart[-1]

    for first, last in run_ranks(4, rank):
        assert 0 < first < 10
        assert schedule == "cosine" or last < 0.25 * first


@every
def test_states_of_optimizers_are_averaged_on_request(case: Case) -> None:
    def rank(communicator: Communicator, average: bool) -> torch.Tensor:
        module = Odd()
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        model = case.make(module, optimizer, communicator, average_states=average)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, communicator.rank, step).backward()
            optimizer.step()
        model.synchronize()
        model.close()
        return torch.cat([optimizer.state[p]["exp_avg"].reshape(-1) for p in module.parameters() if p.requires_grad])

    local, averaged = (run_ranks(3, rank, average) for average in (False, True))
    assert not torch.equal(local[0], local[1])
    for states in averaged:
        assert torch.equal(states, averaged[0])
        assert torch.allclose(states, torch.stack(local).mean(0), atol=1e-6)


@every
def test_several_models_in_one_process(case: Case) -> None:
    """Two wrappers with optimizers of their own do not disturb each other."""

    def rank(communicator: Communicator, both: bool) -> torch.Tensor:
        pairs = []
        for seed in (1, 2) if both else (1,):
            module = Odd(seed)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            pairs.append((case.make(module, optimizer, communicator), optimizer))
        for step in range(4):
            for model, optimizer in pairs:
                optimizer.zero_grad()
                loss_of(model, communicator.rank, step).backward()
                optimizer.step()
        for model, _ in pairs:
            model.wait()
        found = flat(pairs[0][0].module)
        for model, _ in pairs:
            model.close()
        return found

    alone, both = (run_ranks(3, rank, each) for each in (False, True))
    assert all(map(torch.equal, alone, both))


@every
def test_the_module_may_be_called_itself(case: Case) -> None:
    """Points come from the module's own hooks, so that a loop may call the bare module."""

    def rank(communicator: Communicator, bare: bool) -> torch.Tensor:
        module = nn.Sequential(Odd())
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
        model = case.make(module, optimizer, communicator)
        for step in range(5):
            optimizer.zero_grad()
            (module if bare else model)(batch(communicator.rank, step)).square().mean().backward()
            optimizer.step()
        model.wait()
        model.close()
        return flat(module)

    wrapped, bare = (run_ranks(3, rank, each) for each in (False, True))
    assert all(map(torch.equal, wrapped, bare))
