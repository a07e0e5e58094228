"""What a training loop may do beside plain steps: clip, weigh, join, accumulate, scale, compile, switch."""

from __future__ import annotations

import importlib.util
import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bagua_kernels.algorithms import (
    DGC,
    ByteGrad,
    CompressedAllReduce,
    GradientAllReduce,
    Guard,
    PowerSGD,
    SignSGD,
    Stats,
    TopK,
)
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import Odd, batch, fill, gradients, loss_of
from tests.grids import grid


def test_clipping_is_by_the_norm_of_the_mean() -> None:
    def rank(communicator: Communicator) -> tuple[torch.Tensor, list]:
        algorithm = GradientAllReduce(Odd(), communicator=communicator)
        loss_of(algorithm, communicator.rank, 0).backward()
        return algorithm.clip_grad_norm_(0.01), gradients(algorithm)

    everyone = run_ranks(2, rank)
    both = Odd()
    ((loss_of(both, 0, 0) + loss_of(both, 1, 0)) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(both.parameters(), 0.01)
    for found, clipped in everyone:
        assert torch.allclose(found, norm)
        for ours, expected in zip(clipped, gradients(both), strict=True):
            assert (ours is None) == (expected is None)
            assert ours is None or torch.allclose(ours, expected, atol=1e-6)


def test_weights_make_means_over_samples() -> None:
    """Ranks with 1, 2 and 4 samples of a batch: the gradient of the mean over all seven."""

    def rank(communicator: Communicator) -> list:
        algorithm = GradientAllReduce(Odd(), communicator=communicator)
        n = 1 << communicator.rank
        for _ in range(2):
            algorithm.zero_grad()
            algorithm.weigh(n)
            loss_of(algorithm, communicator.rank, 0, n).backward()
        with pytest.raises(ValueError, match=r"weight must be finite and 0 or more, got -1\.0 on rank 1"):
            algorithm.weigh(-1 if communicator.rank == 1 else 1)
        with pytest.raises(ValueError, match="all ranks gave the weight 0"):
            algorithm.weigh(0)
        return gradients(algorithm)

    everyone = run_ranks(3, rank)
    whole = Odd()
    x = torch.cat([batch(r, 0)[: 1 << r] for r in range(3)])
    whole(x).square().mean().backward()
    for grads in everyone:
        for ours, expected in zip(grads, gradients(whole), strict=True):
            assert (ours is None) == (expected is None)
            assert ours is None or torch.allclose(ours, expected, rtol=1e-5, atol=1e-6)


@grid(cover=1, wrap=[GradientAllReduce, ByteGrad, PowerSGD])
def test_join_with_uneven_numbers_of_batches(wrap: type) -> None:
    """Rank r has r + 1 batches; each step averages over those that still train, and all end with the last one's model."""

    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], int]:
        algorithm = wrap(Odd(), communicator=communicator)
        optimizer = torch.optim.SGD(algorithm.parameters(), lr=0.1)
        with algorithm.join():
            for step in range(communicator.rank + 1):
                optimizer.zero_grad()
                loss_of(algorithm, communicator.rank, step).backward()
                optimizer.step()
        # And all together again.
        optimizer.zero_grad()
        loss_of(algorithm, communicator.rank, 9).backward()
        optimizer.step()
        return [p.detach().clone() for p in algorithm.parameters()], algorithm.stats().steps

    everyone = run_ranks(3, rank)
    assert [steps for _, steps in everyone] == [4, 4, 4]
    for other, _ in everyone[1:]:
        assert all(torch.equal(a, b) for a, b in zip(everyone[0][0], other, strict=True))
    if wrap is GradientAllReduce:
        plain = Odd()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for ranks, step in (((0, 1, 2), 0), ((1, 2), 1), ((2,), 2), ((0, 1, 2), 9)):
            optimizer.zero_grad()
            (sum(loss_of(plain, r, step) for r in ranks) / len(ranks)).backward()
            optimizer.step()
        for ours, expected in zip(everyone[0][0], plain.parameters(), strict=True):
            assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_join_hands_over_the_optimizer() -> None:
    """All end with the state of the rank that trained last, which is not rank 0."""

    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], list[float]]:
        algorithm = GradientAllReduce(Odd(), communicator=communicator)
        optimizer = torch.optim.Adam(algorithm.parameters(), lr=0.1)
        with algorithm.join(optimizer):
            for step in range((2, 5, 3)[communicator.rank]):
                optimizer.zero_grad()
                loss_of(algorithm, communicator.rank, step).backward()
                optimizer.step()
        state = [optimizer.state[p] for p in algorithm.parameters() if p.requires_grad]
        # And all together again.
        optimizer.zero_grad()
        loss_of(algorithm, communicator.rank, 9).backward()
        steps = [float(of["step"]) for of in state]
        optimizer.step()
        return [p.detach().clone() for p in algorithm.parameters()], steps

    everyone = run_ranks(3, rank)
    for parameters, steps in everyone:
        assert set(steps) == {5.0}
        assert all(torch.equal(a, b) for a, b in zip(everyone[0][0], parameters, strict=True))


def test_parameters_that_are_shared_between_layers() -> None:
    def rank(communicator: Communicator) -> list:
        module = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
        module[2].weight = module[0].weight
        fill(module)
        algorithm = GradientAllReduce(module, communicator=communicator)
        loss_of(algorithm, communicator.rank, 0).backward()
        return gradients(algorithm)

    first, second = run_ranks(2, rank)
    module = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
    module[2].weight = module[0].weight
    fill(module)
    ((loss_of(module, 0, 0) + loss_of(module, 1, 0)) / 2).backward()
    for a, b, expected in zip(first, second, gradients(module), strict=True):
        assert torch.equal(a, b)
        assert torch.allclose(a, expected, atol=1e-6)


def test_several_forward_passes_before_one_backward() -> None:
    def rank(communicator: Communicator) -> list:
        algorithm = GradientAllReduce(Odd(), communicator=communicator)
        (loss_of(algorithm, communicator.rank, 0) + loss_of(algorithm, communicator.rank, 1)).backward()
        return gradients(algorithm)

    everyone = run_ranks(2, rank)
    plain = Odd()
    (sum(loss_of(plain, r, s) for r in range(2) for s in range(2)) / 2).backward()
    for ours, expected in zip(everyone[0], gradients(plain), strict=True):
        assert ours is None or torch.allclose(ours, expected, atol=1e-5)


def test_two_models_in_one_process_take_turns() -> None:
    """As a generator and a discriminator do."""

    def rank(communicator: Communicator) -> tuple[list, list]:
        one = GradientAllReduce(Odd(1), communicator=communicator)
        two = ByteGrad(Odd(2), communicator=communicator)
        for step in range(2):
            for algorithm in (one, two):
                algorithm.zero_grad()
                loss_of(algorithm, communicator.rank, step).backward()
        return gradients(one), gradients(two)

    first, second = run_ranks(2, rank)
    for a, b in zip(first, second, strict=True):
        assert all(x is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@grid(cover=1, wrap=[GradientAllReduce, ByteGrad])
def test_activation_checkpointing(wrap: type) -> None:
    class Checkpointed(Odd):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(lambda y: torch.tanh(self.first(y)), x, use_reentrant=False)
            return self.second(hidden) * self.scale

    def rank(communicator: Communicator) -> tuple[list, list]:
        grads = []
        for kind in (Odd, Checkpointed):
            algorithm = wrap(kind(), communicator=communicator)
            loss_of(algorithm, communicator.rank, 0).backward()
            grads.append(gradients(algorithm))
        return tuple(grads)

    for plain, checkpointed in run_ranks(2, rank):
        assert all(a is None or torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))


def test_grad_scaler_skips_a_step_on_all_ranks() -> None:
    """An overflow on one rank is one on all, since the mean is infinite."""

    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], float]:
        algorithm = ByteGrad(Odd(), communicator=communicator)
        optimizer = torch.optim.SGD(algorithm.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(algorithm, communicator.rank, step)
            scaler.scale(loss * float("inf") if step == 1 and communicator.rank == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().clone() for p in algorithm.parameters()], scaler.get_scale()

    (first, scale), (second, other) = run_ranks(2, rank)
    assert scale == other == 512.0
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(p.isfinite().all() for p in first)


@pytest.mark.parametrize(
    ("wrap", "options"),
    [
        (SignSGD, {}),
        (CompressedAllReduce, {"codec": {0: "sign", 3: "absmax_int4", 5: None}}),
        (TopK, {"ratio": 0.1}),
        (DGC, {"ratio": 0.1, "clip": 0.05}),
        (PowerSGD, {"rank": 2}),
        (PowerSGD, {"start_step": 2}),
    ],
)
def test_scales_that_change_leave_all_bits(wrap: type, options: dict) -> None:
    """Residuals, and velocities, follow the scaler's scale, and are saved without it."""
    all_of_them = {"exact": (), "min_numel": 0} if issubclass(wrap, CompressedAllReduce) else {}

    def rank(communicator: Communicator, scaled: bool) -> tuple[list[torch.Tensor], dict, float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        more = {"communicator": communicator, "scaler": scaler, **options, **all_of_them}
        one, other = wrap(Odd(), **more), wrap(Odd(), **more)
        found = []
        for step in range(6):
            if step == 4:
                other.load_algorithm_state_dict(one.algorithm_state_dict())
                one = other
            one.zero_grad()
            scaler.scale(loss_of(one, communicator.rank, step)).backward()
            found += [g / scaler.get_scale() for g in gradients(one) if g is not None]
            if scaled and step in (1, 3):
                scaler.update(2.0**9 if step == 1 else 2.0**12)
        return found, one.algorithm_state_dict()["vectors"], one.stats().residual_norm

    everyone = run_ranks(2, partial(rank, scaled=True))
    for scaled, plain in zip(everyone, run_ranks(2, partial(rank, scaled=False)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(scaled[0], plain[0], strict=True))
        assert scaled[1].keys() == plain[1].keys()
        for key, named in scaled[1].items():
            assert all(torch.equal(value, plain[1][key][name]) for name, value in named.items())
        assert scaled[2] == pytest.approx(plain[2])


def test_switch_in_mid_training() -> None:
    def rank(communicator: Communicator) -> list[torch.Tensor]:
        model = GradientAllReduce(Odd(), communicator=communicator)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            if step == 2:
                old, model = model, model.switch_to(TopK, ratio=0.1, exact=(), min_numel=0)
                assert model.stats().steps == 2
                assert old.module is model.module
            optimizer.zero_grad()
            loss_of(model, communicator.rank, step).backward()
            optimizer.step()
        assert model.stats().steps == 4
        assert model.stats().residual_norm > 0
        return [p.detach().clone() for p in model.parameters()]

    first, second = run_ranks(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_votes_know_no_weights() -> None:
    def rank(communicator: Communicator) -> None:
        algorithm = SignSGD(Odd(), communicator=communicator, majority_vote=True)
        with pytest.raises(ValueError, match="SignSGD as it was made knows no weights"):
            algorithm.weigh(2)
        with pytest.raises(ValueError, match="knows no weights"), algorithm.join():
            pass

    run_ranks(1, rank)


def test_buffers_may_be_averaged() -> None:
    """Running means of both ranks, and what cannot be averaged is rank 0's."""

    def rank(communicator: Communicator) -> tuple[torch.Tensor, int]:
        module = nn.BatchNorm1d(7, momentum=1.0)
        algorithm = GradientAllReduce(module, communicator=communicator, average_buffers=True)
        module.running_mean.fill_(float(communicator.rank))
        module.num_batches_tracked.fill_(10 * communicator.rank)
        module.momentum = 0.0
        algorithm(batch(0, 0))
        return module.running_mean.clone(), int(module.num_batches_tracked)

    for mean, count in run_ranks(3, rank):
        assert mean.tolist() == [1.0] * 7
        assert count == 1


def test_stats_for_a_board() -> None:
    class Writer:
        def __init__(self) -> None:
            self.seen: dict[str, tuple[float, int]] = {}

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.seen[name] = (value, step)

    def rank(communicator: Communicator) -> None:
        algorithm = TopK(Odd(), communicator=communicator, guard=Guard(every=1, bound=10), exact=(), min_numel=0)
        loss_of(algorithm, communicator.rank, 0).backward()
        writer, stats = Writer(), algorithm.stats()
        stats.write(writer, 17, "run")
        assert writer.seen["run/steps"] == (1, 17)
        assert writer.seen["run/bytes_sent"] == (stats.bytes_sent, 17)
        assert writer.seen["run/residual_norm"][0] > 0
        assert writer.seen["run/error/second.weight"][0] == stats.errors["second.weight"]

    run_ranks(2, rank)


FULL = Stats(
    steps=3, bytes_sent=7, wait_seconds=0.5, exchange_seconds=float("inf"), residual_norm=float("nan"),
    errors={"a.weight": 0.25, "a.bias": float("nan")}, trial="plain", disagreement=1e-3, decay=None, fresh=0.75,
    staleness={0: 5, 2: 1}, guards={"left out": 2},
)  # fmt: skip


def test_numbers_for_loggers() -> None:
    """One flat dictionary of finite floats, which `log(dict)` of wandb and the like takes; texts are left out."""
    logged: dict[str, float] = {}

    def log(numbers: dict[str, float], step: int) -> None:
        assert all(type(name) is str and type(value) is float for name, value in numbers.items())
        logged.update(json.loads(json.dumps(numbers, allow_nan=False)))

    log(FULL.numbers("run"), step=17)
    assert logged == {
        "run/steps": 3, "run/bytes_sent": 7, "run/wait_seconds": 0.5, "run/disagreement": 1e-3, "run/rounds": 0,
        "run/fresh": 0.75, "run/error/a.weight": 0.25, "run/staleness/0": 5, "run/staleness/2": 1, "run/guard/left out": 2,
    }  # fmt: skip
    assert FULL.numbers().keys() == {name.removeprefix("run/") for name in logged}


def test_boards_have_all_numbers(tmp_path: Path) -> None:
    """`write` uses the names of `numbers`, and does not hide what is not finite; TensorBoard's own writer takes them."""
    seen: dict[str, float] = {}

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            assert step == 17
            seen[name] = value

    FULL.write(Writer(), 17, "run")
    assert {name: value for name, value in seen.items() if math.isfinite(value)} == FULL.numbers("run")
    assert seen.keys() - FULL.numbers("run").keys() == {"run/exchange_seconds", "run/residual_norm", "run/error/a.bias"}
    if importlib.util.find_spec("tensorboard") is not None:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(tmp_path)) as writer:
            FULL.write(writer, 17)
        assert any(tmp_path.iterdir())


@pytest.mark.parametrize("weighed", ["before", "within"])
def test_weights_and_join(weighed: str) -> None:
    """A weight given before does not last, and within every rank announces its own."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        algorithm = GradientAllReduce(Odd(), communicator=communicator)
        optimizer = torch.optim.SGD(algorithm.parameters(), lr=0.1)
        if weighed == "before":
            algorithm.weigh(1 + communicator.rank)
            loss_of(algorithm, communicator.rank, 8).backward()
        with algorithm.join():
            for step in range(2 if communicator.rank else 4):
                optimizer.zero_grad()
                if weighed == "within":
                    algorithm.weigh(1.0)
                loss_of(algorithm, communicator.rank, step).backward()
                optimizer.step()
        return [p.detach().clone() for p in algorithm.parameters()]

    first, second = run_ranks(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    plain = Odd()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        ranks = (0, 1) if step < 2 else (0,)
        (sum(loss_of(plain, r, step) for r in ranks) / len(ranks)).backward()
        optimizer.step()
    for ours, expected in zip(first, plain.parameters(), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_switch_on_one_rank_keeps_the_count() -> None:
    def rank(communicator: Communicator) -> None:
        model = GradientAllReduce(Odd(), communicator=communicator)
        model.load_algorithm_state_dict({"steps": 1000, "order": [], "vectors": {}, "decisions": []})
        assert model.switch_to(TopK).stats().steps == 1000

    run_ranks(1, rank)
