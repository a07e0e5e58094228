"""What local steps are equal to, bit for bit."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import DiLoCo, LocalSGD, OuterNesterov, SlowMo
from bagua_kernels.algorithms.local_steps.outer_round import OuterRound
from bagua_kernels.algorithms.local_steps.outer_rule import Nesterov
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms import parts
from tests.algorithms.gossip.common import Quadratic, Task, falling, flat
from tests.algorithms.local_steps.common import ALL, Case, trained
from tests.algorithms.ranks import Odd, batch
from tests.grids import grid

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
every = grid(cover=1, case=ALL)


@grid(
    size=[2, 3, 5],
    dtype=DTYPES[:3],
    options={"exact": {}, "8 bits": {"codec": "minmax_uint8", "exact": (), "min_numel": 0}, "delay": {"delay": 2}},
    cover=1,
)
def test_outer_steps_that_only_average_are_local_sgd(size: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    common = {"interval": 3, "dtype": dtype, "momentum": 0.5, **options}
    expected = trained(Case(LocalSGD), size, 10, **common)
    assert (expected[-1] != expected[0]).any()
    assert torch.equal(trained(Case(SlowMo, {"slow_lr": 1.0, "slow_momentum": 0.0}), size, 10, **common), expected)
    assert torch.equal(trained(Case(DiLoCo, {"outer_lr": 1.0, "outer_momentum": 0.0}), size, 10, **common), expected)


@grid(
    cover=1,
    case=[Case(LocalSGD), Case(DiLoCo, {"outer_lr": 1.0, "outer_momentum": 0.0}), Case(SlowMo, {"slow_momentum": 0.0})],
)
def test_one_rank_is_plain_pytorch(case: Case) -> None:
    plain = Quadratic()
    task, optimizer = Task(flat(plain).numel()), torch.optim.SGD(plain.parameters(), lr=1.0, momentum=0.9)
    for step in range(9):
        optimizer.param_groups[0]["lr"] = falling(step)
        optimizer.zero_grad()
        task.loss(plain, 0, step).backward()
        optimizer.step()
    plain.seen.append(flat(plain))
    assert torch.equal(trained(case, 1, 9, momentum=0.9)[:, 0], torch.stack(plain.seen))


@grid(cover=1, dtype=DTYPES)
def test_one_rank_with_outer_momentum_is_outer_nesterov(dtype: torch.dtype) -> None:
    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for alone in (True, False):
            module = Odd().to(dtype)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
            outer: Any = (
                OuterNesterov(optimizer, interval=3, outer_lr=0.7, outer_momentum=0.6)
                if alone
                else DiLoCo(module, optimizer, communicator=communicator, interval=3, outer_momentum=0.6)
            )
            for step in range(8):
                optimizer.zero_grad()
                module(batch(0, step).to(dtype)).square().mean().backward()
                optimizer.step()
            if not alone:
                outer.wait()
            outer.close()
            found.append(flat(module))
        return found[0], found[1]

    ((nesterov, diloco),) = run_ranks(1, rank)
    assert torch.equal(nesterov, diloco)
    assert not torch.equal(nesterov, flat(Odd().to(dtype)))


@every
def test_outer_parameters_are_the_same_on_all_ranks_after_each_round(case: Case) -> None:
    def rank(communicator: Communicator) -> list[torch.Tensor]:
        module = Odd()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        model = case.make(module, optimizer, communicator)
        seen = []
        for step in range(9):
            optimizer.zero_grad()
            model(batch(communicator.rank, step)).square().mean().backward()
            optimizer.step()
            model.wait()
            seen.append(torch.cat([parts.start(model, bucket) for bucket in model.local.flat.buckets]).clone())
        model.close()
        return seen

    first, *others = run_ranks(3, rank)
    for other in others:
        assert all(map(torch.equal, first, other))
    assert any(not torch.equal(a, b) for a, b in pairwise(first))


@grid(
    cover=1,
    dtype=DTYPES,
    case=[ALL["local_sgd"], Case(DiLoCo, {"outer_momentum": 0.0}), Case(SlowMo, {"slow_momentum": 0.0})],
)
def test_rounds_without_steps_change_nothing(case: Case, dtype: torch.dtype) -> None:
    """Outer parameters have more bits than a model in bfloat16; a pseudo-gradient begins with what the model holds."""

    def rank(communicator: Communicator) -> None:
        module = Quadratic(dtype=dtype)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = case.make(module, optimizer, communicator, interval=1)
        for step in range(6):
            for p in module.parameters():
                p.grad = torch.full_like(p, 0.37 * (communicator.rank + 1) * (step < 3))
            before = flat(module)
            optimizer.step()
            model.wait()
            assert torch.equal(flat(module), before) == (step >= 3)
        model.close()

    run_ranks(2, rank)


@pytest.mark.parametrize("name", ["diloco", "slow_mo"])
def test_outer_rate_acts_once(name: str) -> None:
    """Twice the rate moves parameters that begin at zero twice as far; both are powers of two."""

    def moved(rate: float) -> torch.Tensor:
        options = {
            "diloco": {"outer_lr": rate, "outer_momentum": 0.0},
            "slow_mo": {"slow_lr": rate, "slow_momentum": 0.0},
        }

        def rank(communicator: Communicator) -> torch.Tensor:
            module = nn.Linear(5, 3)
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            model = ALL[name].make(module, optimizer, communicator, interval=2, **options[name])
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(communicator.rank))
            for _ in range(2):
                optimizer.zero_grad()
                (model(x) - 1).square().mean().backward()
                optimizer.step()
            model.wait()
            model.close()
            return flat(module)

        return run_ranks(2, rank)[0]

    assert moved(1.0).any()
    assert torch.equal(moved(1.0), 2 * moved(0.5))


@every
def test_the_first_round_lowers_the_loss(case: Case) -> None:
    """Of x^2 / 2 from 1: two public projects stepped uphill."""

    def rank(communicator: Communicator) -> float:
        module = nn.Linear(1, 1, bias=False)
        nn.init.ones_(module.weight)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        model = case.make(module, optimizer, communicator, interval=4)
        for _ in range(5):
            optimizer.zero_grad()
            (model(torch.ones(1)).square() / 2).sum().backward()
            optimizer.step()
        model.wait()
        (start,) = (parts.start(model, bucket) for bucket in model.local.flat.buckets)
        model.close()
        return float(start[0])

    assert all(0 < x < 1 for x in run_ranks(2, rank))


@pytest.mark.parametrize("fragments", [2, 3])
def test_every_fragment_is_sent_once_in_an_interval(fragments: int) -> None:
    sent: dict[int, list[tuple[int, tuple[str, ...]]]] = {0: [], 1: []}

    class WatchedRound(OuterRound):
        def run(self, number: int) -> Any:
            sent[self.local.communicator.rank].append((self.local.steps, tuple(self.bucket.names)))
            return super().run(number)

    class Watched(DiLoCo):
        name = f"watched {fragments}"

        def round_for(self, local: LocalModel, bucket: Bucket) -> OuterRound:
            return WatchedRound(
                local, bucket, self.setup.parts_for(bucket), Nesterov(self.outer_lr, self.outer_momentum)
            )

    def rank(communicator: Communicator) -> list[str]:
        module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = Watched(module, optimizer, communicator=communicator, interval=6, fragments=fragments)
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
        model.wait()
        model.close()
        return [name for name, _ in module.named_parameters()]

    names, _ = run_ranks(2, rank)
    assert sent[0] == sent[1]
    for begin in (0, 6):
        rounds = [(step, some) for step, some in sent[0] if begin <= step < begin + 6]
        assert sorted(name for _, some in rounds for name in some) == sorted(names)
        assert {step % (6 // fragments) for step, _ in rounds} == {6 // fragments - 1}
        assert len({step for step, _ in rounds}) == fragments


def test_results_are_used_when_they_are_due() -> None:
    """With a delay of two steps, parameters change by themselves after the second step that follows a round."""

    def rank(communicator: Communicator) -> list[bool]:
        module = Quadratic()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        model = Case(LocalSGD).make(module, optimizer, communicator, interval=4, delay=2)
        changed = []
        for step in range(8):
            before = flat(module)
            with torch.no_grad():
                model(1.0, torch.zeros(before.numel()))
            changed.append(not torch.equal(flat(module), before))
            for p in module.parameters():
                p.grad = torch.full_like(p, float(communicator.rank))
            optimizer.param_groups[0]["lr"] = 0.1 if step == 1 else 0.0
            optimizer.step()
        model.close()
        return changed

    assert run_ranks(2, rank) == [[False] * 6 + [True, False]] * 2
