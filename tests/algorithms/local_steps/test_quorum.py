"""Outer steps by a quorum of ranks: identities, a simulation, slow and lost ranks, ends."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import DiLoCo, LocalSGD, PostLocalSGD, SlowMo, SparseLoCo
from bagua_kernels.algorithms.exchanges.gathered import GatheredMean
from bagua_kernels.algorithms.local_steps.outer_round import OuterRound
from bagua_kernels.algorithms.local_steps.outer_rule import Nesterov
from bagua_kernels.algorithms.local_steps.outer_setup import pseudo_gradient
from bagua_kernels.algorithms.local_steps.penalty import Penalty
from bagua_kernels.algorithms.local_steps.quorum_merges import QuorumMerges
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Schedule, run_ranks
from bagua_kernels.compression import ChunkedTopK
from bagua_kernels.errors import RankLostError
from tests import limits
from tests.algorithms import parts
from tests.algorithms.gossip.common import Quadratic, Task, falling, flat
from tests.algorithms.local_steps.common import Case, trained
from tests.grids import grid
from tests.oracles.gossip import F64

KINDS = {
    "local_sgd": Case(LocalSGD),
    "post_local_sgd": Case(PostLocalSGD, {"first_phase": 3}),
    "diloco": Case(DiLoCo),
    "streaming": Case(DiLoCo, {"fragments": 2, "delay": 1, "blend": 0.5}),
    "delayed": Case(DiLoCo, {"delay": 2}),
    "sparse_loco": Case(SparseLoCo, {"codec": ChunkedTopK(4, 32), "dense": None}),
}


@grid(case=KINDS, size=[2, 3, 5], dtype=[torch.float32, torch.bfloat16], cover=1)
def test_a_quorum_of_all_is_the_outer_loop(case: Case, size: int, dtype: torch.dtype) -> None:
    common = {"dtype": dtype, "momentum": 0.5, **FIXED} if case.kind is DiLoCo else {"dtype": dtype, "momentum": 0.5}
    expected = trained(case, size, 18, **common)
    assert (expected[-1] != expected[0]).any()
    assert torch.equal(trained(case, size, 18, quorum=size, **common), expected)


# With a quorum no rank knows how far all agree.
FIXED = {"outer_momentum": 0.9}


class Gathered(DiLoCo):
    """DiLoCo whose ranks get all payloads, in step."""

    name = "gathered_diloco"

    def round_for(self, local: LocalModel, bucket: Bucket) -> OuterRound:
        difference = pseudo_gradient(bucket)
        codec = None if difference.kind is None else difference.kind.codecs[0]  # type: ignore[attr-defined]
        gathered = GatheredMean(difference, self.setup.communicator, codec, self.feedback)
        return OuterRound(
            local, bucket, self.setup.parts_for(bucket, gathered), Nesterov(self.outer_lr, self.outer_momentum)
        )


@pytest.mark.parametrize("codec", ["absmax_int4", "minmax_uint8", "sign"])
def test_a_quorum_of_all_with_a_codec_is_one_pass_of_payloads(codec: str) -> None:
    options = {"codec": codec, "exact": (), "min_numel": 0, **FIXED}
    assert torch.equal(trained(Case(DiLoCo, options), 3, 17, quorum=3), trained(Case(Gathered, options), 3, 17))


STEPS, INTERVAL, RATE, MOMENTUM = (24, 24, 24, 9), 4, 0.7, 0.8
SAMPLES = (1.0, 2.0, 1.0, 3.0)  # of each step


def late(communicator: Communicator, **options: Any) -> dict[str, Any]:
    """Trains with a quorum of two of four ranks, of which the last one rests in each round."""
    module, me, used = Quadratic(), communicator.rank, []
    task, optimizer = Task(flat(module).numel()), torch.optim.SGD(module.parameters(), lr=falling(0))
    model = DiLoCo(module, optimizer, interval=INTERVAL, quorum=2, communicator=communicator, **options)
    merges: Any = parts.outer_rounds(model).collection.merges
    for step in range(STEPS[me]):
        optimizer.param_groups[0]["lr"] = falling(step)
        optimizer.zero_grad()
        task.loss(model, me, step).backward()
        model.count_samples(SAMPLES[me])
        optimizer.step()
        if step % INTERVAL == INTERVAL - 1:
            model.wait()
            used.append(int(merges.numbers()["merges"]["0"]))
            if me == 3:
                time.sleep(0.02)
    model.synchronize()
    mean = flat(module)
    model.close()
    return {"log": merges.log, "used": used, "mean": mean}


def simulated(log: list[list[tuple[int, int]]], used: list[list[int]]) -> F64:
    """The mean of the parameters of all ranks at the end, in float64, from who was merged and what was used when."""
    start = flat(Quadratic()).double().numpy()
    task, starts, momentum = Task(len(start)), [start], np.zeros_like(start)
    posts: dict[tuple[int, int], F64] = {}
    # Of each rank: its parameters, its number of steps, and how many merges it has used.
    x, steps, place = [start] * 4, [0] * 4, [0] * 4

    def train(rank: int, count: int) -> None:
        for step in range(steps[rank], steps[rank] + count):
            gradient = task.h(rank) * (x[rank] - task.b(rank, step).astype(np.float64))
            x[rank] = x[rank] - falling(step) * gradient
        steps[rank] += count

    def advance(rank: int, number: int) -> None:
        """Takes a rank to the end of the round of a post."""
        while (rank, number) not in posts:
            done = steps[rank] // INTERVAL
            if done:
                place[rank] = used[rank][done - 1]
                x[rank] = starts[place[rank]]
            before = x[rank]
            train(rank, INTERVAL)
            posts[rank, done] = before - x[rank]

    for keys in log:
        weights = []
        for rank, number in keys:
            advance(rank, number)
            weights.append((INTERVAL * SAMPLES[rank]) ** 2 / INTERVAL)
        mean = sum(w * posts[key] for w, key in zip(weights, keys, strict=True)) / sum(weights)
        momentum = MOMENTUM * momentum + mean
        start = start - RATE * (mean + MOMENTUM * momentum)
        starts.append(start)
    for rank in range(4):
        rounds, rest = divmod(STEPS[rank], INTERVAL)
        place[rank] = used[rank][rounds - 1]
        x[rank] = starts[place[rank]]
        train(rank, rest)
        x[rank] = x[rank] + starts[-1] - starts[place[rank]]
    return np.asarray(sum(x) / 4)


def test_late_posts_count_in_the_next_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks merge the same posts, and have what a simulation in float64 makes of them."""
    merge = QuorumMerges._merge

    def recording(merges: Any, part: int, posts: Any) -> None:
        merges.__dict__.setdefault("log", []).append([(post.rank, post.number) for post in posts])
        merge(merges, part, posts)

    monkeypatch.setattr(QuorumMerges, "_merge", recording)
    options = {"outer_lr": RATE, "outer_momentum": MOMENTUM, "bucket_bytes": 500}
    results = run_ranks(4, lambda c: late(c, **options))
    log = results[0]["log"]
    assert all(result["log"] == log for result in results)
    assert sorted(key for keys in log for key in keys) == sorted(
        (rank, number) for rank in range(4) for number in range(STEPS[rank] // INTERVAL)
    )
    assert any(len(keys) < 4 for keys in log)
    assert all(torch.equal(result["mean"], results[0]["mean"]) for result in results)
    expected = simulated(log, [result["used"] for result in results])
    np.testing.assert_allclose(results[0]["mean"].double().numpy(), expected, rtol=0, atol=2e-5)


class Tiny(nn.Module):
    """A few parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        with torch.no_grad():
            for place, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) + place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.layer(x))
        return out


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def made(communicator: Communicator, **options: Any) -> tuple[Tiny, torch.optim.Optimizer, Any]:
    module = Tiny()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return module, optimizer, DiLoCo(module, optimizer, interval=2, communicator=communicator, **options)


def everything(module: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in [*module.parameters(), module.norm.running_mean]]  # type: ignore[union-attr,list-item]


def test_a_rank_that_is_late_delays_nobody() -> None:
    """One of four takes its first step after the others have taken all of theirs."""
    others = threading.Barrier(4)

    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], float]:
        module, optimizer, model = made(communicator, quorum=3, grace=0.01)
        if communicator.rank == 1:
            others.wait(limits.seconds(50))
        for number in range(8):
            step(model, optimizer, 10 * number + communicator.rank)
        model.wait()
        if communicator.rank != 1:
            others.wait(limits.seconds(50))
        model.synchronize()
        model.close()
        return everything(module), model.stats().wait_seconds

    results = run_ranks(4, rank)
    for result, _ in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0][0], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [(0,), (2,), (0, 1), (3, 1)], ids=str)
def test_lost_ranks_are_absent(lost: tuple[int, ...]) -> None:
    """Those that are left train on, and end with the mean of their parameters."""
    size = 5

    def rank(communicator: Communicator) -> list[torch.Tensor] | None:
        module, optimizer, model = made(communicator, quorum=size - len(lost))
        for number in range(12):
            if communicator.rank in lost and number == 5 + communicator.rank:
                with pytest.raises(KeyError), model:
                    raise KeyError("lost")
                return None
            step(model, optimizer, 10 * number + communicator.rank)
        with model.averaged():
            mean = everything(module)
        model.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(everything(module), mean, strict=True))
        step(model, optimizer, 1)
        model.close()
        return mean

    results = run_ranks(size, rank)
    left = [result for me, result in enumerate(results) if me not in lost]
    assert [me for me, result in enumerate(results) if result is None] == sorted(lost)
    for result in left[1:]:
        assert result is not None
        assert left[0] is not None
        assert all(torch.equal(a, b) for a, b in zip(result, left[0], strict=True))


def test_too_few_ranks_left_are_an_error() -> None:
    def rank(communicator: Communicator) -> str:
        _, optimizer, model = made(communicator, quorum=2)
        try:
            for number in range(6):
                if communicator.rank > 0 and number == 3:
                    raise KeyError("lost")
                step(model, optimizer, number)
            model.synchronize()
        except (KeyError, RankLostError) as error:
            with pytest.raises(type(error)), model:
                raise
            return f"{type(error).__name__}: {error}"
        raise AssertionError("no error")

    first, *others = run_ranks(3, rank)
    assert first.startswith("RankLostError: ")
    assert "training that needs 2 ranks, of 1 left" in first
    assert others == ["KeyError: 'lost'"] * 2


def test_resumed_training_has_the_same_bits() -> None:
    """With all ranks as the quorum, for otherwise time decides what is merged."""

    def rank(communicator: Communicator) -> bool:
        options = {"quorum": communicator.size, "fragments": 2, "codec": "absmax_int4"}
        options |= {"exact": (), "min_numel": 0}
        module, optimizer, model = made(communicator, **options)
        for number in range(5):
            step(model, optimizer, 10 * number + communicator.rank)
        state = copy.deepcopy(model.algorithm_state_dict())
        other, other_optimizer, resumed = made(communicator, **options)
        resumed.load_algorithm_state_dict(state)
        for number in range(5, 14):
            step(model, optimizer, 10 * number + communicator.rank)
            step(resumed, other_optimizer, 10 * number + communicator.rank)
        for each in (model, resumed):
            each.synchronize()
            each.close()
        return all(torch.equal(a, b) for a, b in zip(everything(module), everything(other), strict=True))

    assert run_ranks(3, rank) == [True] * 3


def test_checkpoints_of_a_delayed_momentum_go_on() -> None:
    """Their sums of differences are left out, also of what is saved later."""

    def rank(communicator: Communicator) -> tuple[bool, set[str]]:
        module, optimizer, model = made(communicator, momentum_every=1)
        for number in range(5):
            step(model, optimizer, 10 * number + communicator.rank)
        state = copy.deepcopy(model.algorithm_state_dict())
        old = copy.deepcopy(state)
        old["vectors"]["gathered"] = {name: torch.ones_like(x) for name, x in state["vectors"]["start"].items()}
        ends = []
        for each in (state, old):
            module, optimizer, model = made(communicator)
            model.load_algorithm_state_dict(each)
            for number in range(5, 10):
                step(model, optimizer, 10 * number + communicator.rank)
            ends.append(everything(module))
            saved = set(model.algorithm_state_dict()["vectors"])
            model.close()
        return all(torch.equal(a, b) for a, b in zip(*ends, strict=True)), saved

    assert run_ranks(2, rank) == [(True, {"start", "outer_momentum"})] * 2


@grid(
    cover=1,
    kind__options__text=[
        (DiLoCo, {"quorum": 3}, "at most the number of ranks, 2"),
        (DiLoCo, {"quorum": 0}, "quorum must be at least 1"),
        (DiLoCo, {"quorum": 1, "grace": -1.0}, "grace 0 or more"),
        (DiLoCo, {"grace": 1.0}, "grace is for a quorum"),
        (DiLoCo, {"quorum": 1, "by_speed": True}, "does not go with by_speed"),
        (DiLoCo, {"quorum": 1, "penalty": Penalty()}, "does not go with penalty"),
        (DiLoCo, {"quorum": 1, "sync_state": (1, 1)}, "does not go with sync_state"),
        (DiLoCo, {"quorum": 1, "codec": {0: "sign", 5: "absmax_int4"}, "exact": (), "min_numel": 0}, "one codec"),
        (DiLoCo, {"momentum_every": 2}, "momentum_every must be 1, got momentum_every=2: leave it out"),
        (SlowMo, {"quorum": 1}, "needs all ranks in step"),
    ],
)
def test_what_does_not_fit_is_refused(kind: Any, options: dict[str, Any], text: str) -> None:
    def rank(communicator: Communicator) -> None:
        module = Tiny()
        with pytest.raises(ValueError, match=text):
            kind(module, torch.optim.SGD(module.parameters(), lr=0.1), communicator=communicator, **options)

    run_ranks(2, rank)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_virtual_clock_repeats_whole_trainings(seed: int) -> None:
    def trained_once() -> list[list[torch.Tensor]]:
        schedule = Schedule(seed, latency=lambda draws: draws.uniform(0, 2))

        def rank(communicator: Communicator) -> list[torch.Tensor]:
            module, optimizer, model = made(communicator, quorum=2, grace=0.5, fragments=2)
            for number in range(4 + 3 * communicator.rank):
                step(model, optimizer, 10 * number + communicator.rank)
                schedule.sleep(1.0 + communicator.rank % 2)
            model.synchronize()
            model.close()
            return everything(module)

        return run_ranks(4, rank, timeout=1000.0, schedule=schedule)

    first, again = trained_once(), trained_once()
    assert all(
        torch.equal(a, b) for one, other in zip(first, again, strict=True) for a, b in zip(one, other, strict=True)
    )
    assert all(torch.equal(a, b) for one in first for a, b in zip(one, first[0], strict=True))
