"""What every asynchronous algorithm must do, run by thread ranks."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import ByteGrad
from bagua_kernels.comm import Communicator, run_ranks
from tests import limits
from tests.algorithms.asynchronous.common import ALL, Make, flat, made, quiet, shuffled, train, trained
from tests.algorithms.ranks import Odd, batch, fill
from tests.grids import grid, only

every = grid(cover=1, make=ALL)
several = grid(cover=1, name=only(ALL, "wagma", "average, codec", "pairs"))


@every
def test_start_is_rank_0s(make: Make) -> None:
    def rank(communicator: Communicator) -> dict[str, torch.Tensor]:
        module, _, model = made(make, communicator, Odd(seed=communicator.rank))
        state = copy.deepcopy(module.state_dict())
        model.close()
        return state

    everyone = run_ranks(3, rank)
    for other in everyone[1:]:
        assert all(torch.equal(value, other[name]) for name, value in everyone[0].items())
    assert torch.equal(everyone[2]["first.weight"], Odd(0).first.weight)


@every
def test_one_rank_is_plain_pytorch(make: Make) -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        module, optimizer, model = made(make, communicator)
        train(model, optimizer, 0, range(6))
        model.synchronize()
        with model.averaged():
            pass
        model.close()
        return flat(module)

    alone = Odd()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.5)
    train(alone, optimizer, 0, range(6))
    assert torch.equal(run_ranks(1, rank)[0], flat(alone))


@every
@grid(cover=1, size=[2, 3, 5])
def test_synchronize_gives_all_ranks_the_mean(make: Make, size: int) -> None:
    """Also after different numbers of steps."""

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]:
        module, optimizer, model = made(make, communicator)
        train(
            model, optimizer, communicator.rank, range(5 if "warmup_steps" in str(make) else 4 + 3 * communicator.rank)
        )
        quiet(model)
        apart = model.consensus()
        before = trained(module)
        model.synchronize()
        after = trained(module)
        if hasattr(model, "resume"):
            model.resume()
        train(model, optimizer, communicator.rank, range(20, 26))
        model.synchronize()
        last = trained(module)
        model.close()
        return before, after, apart, last

    everyone = run_ranks(size, rank)
    mean = torch.stack([before.double() for before, *_ in everyone]).mean(0)
    square = sum(float((before.double() - mean).square().sum()) for before, *_ in everyone) / size
    for _, after, apart, last in everyone:
        assert torch.equal(after, everyone[0][1])
        assert (after - mean).abs().max() <= 1e-6 * mean.abs().max()
        assert apart == pytest.approx(square**0.5, rel=1e-3, abs=1e-7)
        assert torch.equal(last, everyone[0][3])
        assert not torch.equal(last, after)


@every
def test_averaged_lends_the_mean(make: Make) -> None:
    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        module = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
        fill(module)
        _, optimizer, model = made(make, communicator, module)
        train(model, optimizer, communicator.rank, range(4))
        quiet(model)
        assert model.consensus() >= 0
        before, buffer = trained(module), module[1].running_mean.clone()
        with model.averaged():
            within = trained(module)
            # Others train on as soon as they are through.
            time.sleep(0.01 * communicator.rank)
            model.eval()
            model(batch(communicator.rank, 9))
            assert torch.equal(trained(module), within)
            model.train()
        assert torch.equal(trained(module), before)
        assert torch.equal(module[1].running_mean, buffer)
        train(model, optimizer, communicator.rank, range(4, 8))
        model.close()
        return before, within

    everyone = run_ranks(3, rank)
    mean = torch.stack([before.double() for before, _ in everyone]).mean(0)
    for _, within in everyone:
        assert torch.equal(within, everyone[0][1])
        assert (within - mean).abs().max() <= 1e-6 * mean.abs().max()


@every
def test_collective_calls_after_different_numbers_of_steps(make: Make) -> None:
    """Also after none: a rank that calls again at once takes part in what the others do until they call."""

    def rank(communicator: Communicator) -> torch.Tensor:
        module, optimizer, model = made(make, communicator)
        train(model, optimizer, communicator.rank, range(2))
        for turn in range(4):
            assert model.consensus() >= 0
            train(model, optimizer, communicator.rank, range(5 * ((communicator.rank + turn) % 3)))
        model.synchronize()
        model.close()
        return flat(module)

    everyone = run_ranks(3, rank, timeout=limits.seconds(10))
    assert all(torch.equal(each, everyone[0]) for each in everyone)


@every
def test_an_evaluation_sees_parameters_that_do_not_change(make: Make) -> None:
    def rank(communicator: Communicator) -> None:
        module, optimizer, model = made(make, communicator)
        for step in range(6):
            train(model, optimizer, communicator.rank, range(step, step + 1))
            before = flat(module)
            model.eval()
            for _ in range(3):
                model(batch(communicator.rank, 9))
                time.sleep(0.002)
                assert torch.equal(flat(module), before)
            model.train()
        model.close()

    run_ranks(3, rank)


@every
def test_parameters_without_gradients_and_frozen_ones(make: Make) -> None:
    """A parameter that has no gradient on some ranks takes part; frozen ones stay as they are."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Odd()
            self.extra = nn.Linear(7, 13)
            fill(self, 3)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            return self.odd(x) + (self.extra(x) if both else 0.0)

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        module, optimizer, model = made(make, communicator, Two())
        frozen = module.odd.frozen.clone()
        for step in range(6):
            optimizer.zero_grad()
            model(batch(communicator.rank, step), both=communicator.rank == 0).square().mean().backward()
            optimizer.step()
        model.synchronize()
        assert torch.equal(module.odd.frozen, frozen)
        model.close()
        return flat(module), module.extra.weight.detach().clone()

    everyone = run_ranks(3, rank)
    assert all(torch.equal(each, everyone[0][0]) for each, _ in everyone)
    start = Two().extra.weight
    assert not torch.equal(everyone[1][1], start)


@every
@grid(cover=1, dtype=[torch.bfloat16, torch.float64])
def test_other_dtypes(make: Make, dtype: torch.dtype) -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        module, optimizer, model = made(make, communicator, Odd().to(dtype), lr=0.01)
        for step in range(5):
            optimizer.zero_grad()
            model(batch(communicator.rank, step).to(dtype)).float().square().mean().backward()
            optimizer.step()
        model.synchronize()
        model.close()
        return flat(module)

    everyone = run_ranks(3, rank)
    assert all(torch.equal(each, everyone[0]) for each in everyone)
    assert everyone[0].dtype == dtype
    assert everyone[0].isfinite().all()


@several
def test_a_saved_run_goes_on(name: str) -> None:
    """What is loaded is what was saved, and training goes on from there; versions agree."""

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        module, optimizer, model = made(ALL[name], communicator)
        train(model, optimizer, communicator.rank, range(5 + communicator.rank))
        state = copy.deepcopy(model.algorithm_state_dict())
        saved = flat(module)
        train(model, optimizer, communicator.rank, range(9, 12))
        model.load_algorithm_state_dict(state)
        assert torch.equal(flat(module), saved)
        train(model, optimizer, communicator.rank, range(9, 12))
        model.close()
        other, optimizer, model = made(ALL[name], communicator)
        model.load_algorithm_state_dict(state)
        assert torch.equal(flat(other), saved)
        assert model.stats().steps == 5 + communicator.rank
        train(model, optimizer, communicator.rank, range(9, 30))
        before = trained(other)
        assert model.consensus() < 1.0
        model.synchronize()
        after = trained(other)
        model.close()
        return before, after

    everyone = run_ranks(3, rank)
    mean = torch.stack([before.double() for before, _ in everyone]).mean(0)
    assert all(after.allclose(everyone[0][1]) and after.isfinite().all() for _, after in everyone)
    assert float(mean.abs().max()) < 10


@several
def test_another_number_of_ranks_begins_with_the_mean(name: str) -> None:
    def first(communicator: Communicator) -> tuple[Any, torch.Tensor]:
        module, optimizer, model = made(ALL[name], communicator)
        train(model, optimizer, communicator.rank, range(4))
        state = copy.deepcopy(model.algorithm_state_dict())
        before = trained(module)
        model.close()
        return state, before

    found = run_ranks(3, first)
    states, before = [state for state, _ in found], [vector for _, vector in found]

    def second(communicator: Communicator) -> torch.Tensor:
        module, optimizer, model = made(ALL[name], communicator)
        model.load_algorithm_state_dict(copy.deepcopy(states))
        loaded = trained(module)
        train(model, optimizer, communicator.rank, range(3))
        model.close()
        return loaded

    mean = torch.stack([each.double() for each in before]).mean(0)
    for loaded in run_ranks(2, second):
        assert (loaded - mean).abs().max() <= 1e-6


@several
def test_switching_to_gradients(name: str) -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        module, optimizer, model = made(ALL[name], communicator)
        train(model, optimizer, communicator.rank, range(3 + communicator.rank))
        other = model.switch_to(ByteGrad)
        train(other, optimizer, communicator.rank, range(3))
        other.close()
        return flat(module)

    everyone = run_ranks(3, rank)
    assert all(torch.equal(each, everyone[0]) for each in everyone)


def test_options_that_make_no_sense() -> None:
    from bagua_kernels.algorithms import AsyncModelAverage, Wagma

    def refused(communicator: Communicator) -> None:
        def wrap(kind: Any, **options: Any) -> None:
            module = Odd()
            kind(module, torch.optim.SGD(module.parameters(), lr=0.1), communicator=communicator, **options)

        for kind, options, text in (
            (Wagma, {"period": 0}, "period must be at least 1"),
            (Wagma, {"stale_rule": "never"}, "stale_rule must be"),
            (Wagma, {"activate": "nobody"}, "activate must be"),
            (AsyncModelAverage, {"interval": 0}, "interval at least 1"),
            (AsyncModelAverage, {"interval_ms": -1.0}, "at least 0"),
            (AsyncModelAverage, {"interval_ms": 1.0, "interval": 2}, "got both"),
        ):
            with pytest.raises(ValueError, match=text):
                wrap(kind, **options)

    run_ranks(2, refused)


def test_pause_and_resume() -> None:
    def rank(communicator: Communicator) -> tuple[int, int, int]:
        module, optimizer, model = made(ALL["average"], communicator)
        train(model, optimizer, communicator.rank, range(3))
        time.sleep(0.05)
        model.pause()
        communicator.barrier().wait()
        time.sleep(0.05)
        before = model.stats().rounds
        time.sleep(0.05)
        paused = model.stats().rounds
        communicator.barrier().wait()
        model.resume()
        time.sleep(0.1)
        after = model.stats().rounds
        model.close()
        return before, paused, after

    for before, paused, after in run_ranks(3, rank):
        assert 0 < before == paused < after


def test_groups_of_any_size() -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        module, optimizer, model = made(shuffled(communicator.size), communicator)
        train(model, optimizer, communicator.rank, range(12))
        model.synchronize()
        stats = model.stats()
        model.close()
        assert sum(stats.staleness.values()) == stats.rounds == 12
        assert 0 <= stats.fresh <= 1
        assert max(stats.staleness) <= 4
        return flat(module)

    for size in (3, 5, 6, 7):
        everyone = run_ranks(size, rank)
        assert all(torch.equal(each, everyone[0]) for each in everyone)
