"""`only_if_faster`: steps with and without compression take turns, are timed, and what is faster goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels.algorithms import (
    DGC,
    Algorithm,
    ByteGrad,
    CompressedAllReduce,
    DoubleSqueeze,
    GradientAllReduce,
    Guard,
    OneBitAdam,
    PowerSGD,
    QAdam,
    RandomK,
    SignSGD,
    TopK,
    from_spec,
)
from bagua_kernels.algorithms.choosing.turns import BLOCK
from bagua_kernels.algorithms.exchanges.compressed import CompressedExchange
from bagua_kernels.algorithms.policy.only_if_faster import BLOCKS, OnlyIfFaster, Trial
from bagua_kernels.algorithms.policy.schedule import Assignment
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import Odd, train
from tests.algorithms.training import ODD, Everyone, Given, draw, same
from tests.grids import grid

STEPS = BLOCK * BLOCKS

SLOWER, FASTER = {"compressed": 3.0, "plain": 2.0}, {"compressed": 1.0, "plain": 2.0}

EVERYTHING: dict[str, Any] = {"exact": (), "min_numel": 0}  # the models here are small

WRAPS: dict[str, Callable[..., Algorithm]] = {
    "bytegrad": partial(ByteGrad, error_feedback=True),
    "sign": partial(SignSGD, **EVERYTHING),
    "double_squeeze": partial(DoubleSqueeze, **EVERYTHING),
    "topk": partial(TopK, ratio=0.1, **EVERYTHING),
    "randomk": partial(RandomK, ratio=0.1, **EVERYTHING),
    "dgc": partial(DGC, ratio=0.1, masking=False, **EVERYTHING),
    "powersgd": partial(PowerSGD, min_compression=0.5),
}


class Clock:
    """Stands still but for passes, which take as long as it is told."""

    def __init__(self, algorithm: Algorithm, compressed: float, plain: float) -> None:
        self.algorithm, self.compressed, self.plain = algorithm, compressed, plain
        self.now, self.begun = 0.0, False

    def __call__(self) -> float:
        if self.begun:
            self.now += self.compressed if compresses(self.algorithm) else self.plain
        self.begun = not self.begun
        return self.now


def compresses(algorithm: Algorithm) -> bool:
    """Whether anything is compressed in the step that is under way, or to come."""
    engine = algorithm._engine
    step = engine.counters.steps
    return any(
        (e.codec(step) if isinstance(e, CompressedExchange) else algorithm.policy.codec(e.bucket.kind, step))
        is not None
        for e in engine.buckets.exchanges
    )


def trial_of(algorithm: Algorithm) -> Trial:
    policy = algorithm.policy
    return (policy if isinstance(policy, OnlyIfFaster) else policy.inner).trial


def timed(algorithm: Algorithm, compressed: float, plain: float) -> Algorithm:
    """Forces what comes out of the trial."""
    algorithm._engine.timer.clock = Clock(algorithm, compressed, plain)
    return algorithm


def steps(algorithm: Algorithm, data: list[Everyone], rank: int) -> tuple[list[dict[str, np.ndarray]], list[bool]]:
    """Takes steps; returns the means, and whether each step was compressed."""
    means, kinds = [], []
    for everyone in data:
        kinds.append(compresses(algorithm))
        algorithm.zero_grad(set_to_none=True)
        algorithm({name: torch.from_numpy(g.copy()) for name, g in everyone[rank].items()}).backward()
        means.append({n: p.grad.numpy().copy() for n, p in algorithm.module.named_parameters()})
    return means, kinds


def owed(states: list[dict[str, Any]], parameter: str) -> np.ndarray:
    """What is still to come of a parameter's mean: that of what ranks owe, and what owners do, the same on all."""
    keys = [key for key in ("worker", "owner", "residual") if parameter in states[0]["vectors"].get(key, {})]
    own = [s["vectors"][key][parameter].double().numpy().reshape(ODD[parameter]) for s in states for key in keys]
    return sum(own, np.zeros(ODD[parameter])) / len(states)


@grid(cover=1, seconds={"slower": SLOWER, "faster": FASTER}, name=list(WRAPS))
def test_nothing_is_lost_and_ranks_agree(name: str, seconds: dict[str, float]) -> None:
    """All that was applied, and what residuals still hold, is the sum of all means, with DGC of their momentum."""
    before, after = 2, 6
    data = draw(ODD, 2, before + STEPS + after)
    start = "start_step" if name == "powersgd" else "warmup_steps"

    def rank(communicator: Communicator) -> tuple[list, list, list, list]:
        algorithm = WRAPS[name](
            Given(ODD), communicator=communicator, only_if_faster=True, bucket_bytes=500, **{start: before}
        )
        timed(algorithm, **seconds)
        outcomes, means, kinds, states = [], [], [], []
        for first, last in (
            (0, before),
            (before, before + STEPS - 1),
            (before + STEPS - 1, before + STEPS),
            (-after, None),
        ):
            outcomes.append(algorithm.stats().trial)
            mean, kind = steps(algorithm, data[first:last], communicator.rank)
            means, kinds = means + mean, kinds + kind
            states.append(algorithm.algorithm_state_dict())
        outcomes.append(algorithm.stats().trial)
        assert (algorithm.stats().residual_norm == 0) == (seconds is SLOWER)
        return outcomes, means, kinds, states

    everyone = run_ranks(2, rank)
    outcomes, means, kinds, _ = everyone[0]
    verdict = "plain" if seconds is SLOWER else "compressed"
    assert outcomes == ["", "", "running", verdict, verdict]
    turns = [place // BLOCK % 2 == 0 for place in range(STEPS)]
    assert kinds == [False] * before + turns + [seconds is FASTER] * after
    assert same(means, everyone[1][1])
    assert everyone[1][0] == outcomes
    ends = [before, before + STEPS - 1, before + STEPS, before + STEPS + after]
    for parameter in ODD:
        applied = np.cumsum([mean[parameter].astype(np.float64) for mean in means], 0)
        made, velocity = [], np.zeros(ODD[parameter])
        for gradients in data:
            mean = sum(g[parameter].astype(np.float64) for g in gradients) / 2
            velocity = mean + (0.9 * velocity if name == "dgc" else 0)
            made.append(velocity)
        produced = np.cumsum(made, 0)
        for number, end in enumerate(ends):
            still = owed([states[number] for *_, states in everyone], parameter)
            error = np.abs(applied[end - 1] + still - produced[end - 1]).max()
            assert error <= 2e-5 * max(1e-9, np.abs(produced[:end]).max()), (parameter, end)
        if seconds is SLOWER:
            for place in range(len(data) - after + 1, len(data)):
                assert np.allclose(
                    means[place][parameter], made[place], rtol=1e-4, atol=1e-5 * np.abs(made[place]).max()
                )


@grid(cover=1, seconds={"slower": SLOWER, "faster": FASTER}, wrap=[QAdam, OneBitAdam])
def test_adams_lose_no_momentum(wrap: type, seconds: dict[str, float]) -> None:
    """m = beta1 m + (1 - beta1) g + e of before - e of now, of all ranks' means; e is zero after plain steps."""
    shape, freeze, after = (16, 32), 3, 6
    data = draw({"w": shape}, 2, freeze + STEPS + after)

    def rank(communicator: Communicator) -> tuple[list, list, list, list]:
        more = EVERYTHING if wrap is OneBitAdam else {"error_feedback": True}
        model = wrap(
            Given({"w": shape}),
            communicator=communicator,
            freeze_step=freeze,
            limit=float("inf"),
            only_if_faster=True,
            **more,
        )
        timed(model, **seconds)
        momenta, kinds, residuals, parameters = [], [], [], []
        for everyone in data:
            _, kind = steps(model, [everyone], communicator.rank)
            model.optimizer.step()
            kinds += kind
            momenta.append(model.optimizer.state[model.module.w]["exp_avg"].double().numpy().copy())
            vectors = model.algorithm_state_dict()["vectors"]
            own = [vectors[key]["w"].double().numpy().reshape(shape) for key in ("worker", "owner") if key in vectors]
            residuals.append(sum(own, np.zeros(shape)))
            parameters.append(model.module.w.detach().numpy().copy())
        return momenta, kinds, residuals, parameters

    everyone = run_ranks(2, rank)
    momenta, kinds, *_ = everyone[0]
    turns = [place // BLOCK % 2 == 0 for place in range(STEPS)]
    assert kinds == [False] * freeze + turns + [seconds is FASTER] * after
    assert all(np.array_equal(a, b) for a, b in zip(everyone[0][3], everyone[1][3], strict=True))
    kept = [(a + b) / 2 for a, b in zip(everyone[0][2], everyone[1][2], strict=True)]
    for t, (compressed, gradients) in enumerate(zip(kinds, data, strict=True)):
        assert compressed == bool(np.abs(kept[t]).max() > 0)
        mean = (gradients[0]["w"].astype(np.float64) + gradients[1]["w"]) / 2
        expected = 0.1 * mean + (0.9 * momenta[t - 1] + kept[t - 1] if t else 0) - kept[t]
        assert np.abs(momenta[t] - expected).max() <= 1e-5 * np.abs(expected).max()


def test_slowest_rank_decides_for_all_and_one_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="bagua_kernels.algorithms.policy.only_if_faster")

    def rank(communicator: Communicator) -> str:
        algorithm = ByteGrad(Odd(communicator.rank), communicator=communicator, only_if_faster=True)
        timed(algorithm, 3.0 if communicator.rank == 2 else 1.0, 2.0)
        train(communicator, algorithm, steps=STEPS)
        return algorithm.stats().trial

    assert run_ranks(3, rank) == ["plain"] * 3
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "compression is switched off: a step takes 3 s with, 2 s without")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [ByteGrad, PowerSGD])
def test_real_clock(wrap: type) -> None:
    """Whatever comes out, all ranks say the same and have the same parameters."""

    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], str, tuple[float, float]]:
        parameters, algorithm = train(communicator, wrap, steps=STEPS + 2, only_if_faster=True, bucket_bytes=600)
        return parameters, algorithm.stats().trial, trial_of(algorithm).medians

    first, *others = run_ranks(3, rank)
    assert first[1] in ("compressed", "plain")
    assert all(0 < median < 10 for median in first[2])
    for other in others:
        assert other[1:] == first[1:]
        assert all(torch.equal(a, b) for a, b in zip(first[0], other[0], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [SLOWER, FASTER], ids=["slower", "faster"])
@pytest.mark.parametrize("name", WRAPS)
def test_checkpoint_keeps_the_verdict(name: str, seconds: dict[str, float]) -> None:
    """And goes on with the same bits, whatever the clock would say now."""
    data = draw(ODD, 2, STEPS + 6)

    def rank(communicator: Communicator) -> None:
        make = partial(WRAPS[name], communicator=communicator, bucket_bytes=500)
        whole = timed(make(Given(ODD), only_if_faster=True), **seconds)
        steps(whole, data[:STEPS], communicator.rank)
        state = whole.algorithm_state_dict()
        again = make(Given(ODD), only_if_faster=True)
        again.load_algorithm_state_dict(state)
        assert again.stats().trial == whole.stats().trial == ("plain" if seconds is SLOWER else "compressed")
        expected, found = (steps(a, data[STEPS:], communicator.rank) for a in (whole, again))
        assert same(expected[0], found[0])
        assert found[1] == [seconds is FASTER] * 6
        # Who does not ask for a trial compresses.
        other = make(Given(ODD))
        other.load_algorithm_state_dict(state)
        assert compresses(other)
        assert other.algorithm_state_dict()["decisions"] == []

    run_ranks(2, rank)


def test_checkpoint_within_a_trial_begins_it_anew() -> None:
    def rank(communicator: Communicator) -> list[bool]:
        first = timed(SignSGD(Given(ODD), communicator=communicator, only_if_faster=True, **EVERYTHING), **SLOWER)
        data = draw(ODD, 2, 6)
        steps(first, data, communicator.rank)
        state = first.algorithm_state_dict()
        assert state["decisions"] == []
        again = timed(SignSGD(Given(ODD), communicator=communicator, only_if_faster=True, **EVERYTHING), **SLOWER)
        again.load_algorithm_state_dict(state)
        assert again.stats().trial == ""
        kinds = steps(again, (data * 7)[: STEPS + 2], communicator.rank)[1]
        # It may be loaded by what trained already, too.
        again.load_algorithm_state_dict(state)
        assert again.stats().trial == ""
        return kinds

    for kinds in run_ranks(2, rank):
        assert kinds == [place // BLOCK % 2 == 0 for place in range(STEPS)] + [False] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the mean of bucket 0:RuntimeWarning")
def test_guard_and_trial_decide_side_by_side() -> None:
    def rank(communicator: Communicator) -> tuple[str, list, str]:
        guard = Guard(every=2, bound=1e-3, action="widen")
        make = partial(
            SignSGD, communicator=communicator, guard=guard, only_if_faster=True, exact=(), min_numel=0, block=64
        )
        algorithm = timed(make(Odd()), **FASTER)
        train(communicator, algorithm, steps=STEPS)
        again = make(Odd())
        again.load_algorithm_state_dict(algorithm.algorithm_state_dict())
        bucket = again._engine.buckets.all[0]
        return again.stats().trial, again.policy.state(), type(again.policy.codec(bucket.kind, STEPS)).__name__

    for outcome, decisions, codec in run_ranks(2, rank):
        assert outcome == "compressed"
        assert decisions[0] == ("trial", "compressed")
        assert len(decisions) == 2
        assert codec in ("AbsMaxInt4", "AbsMaxInt8", "Cast", "NoneType")


def test_trial_goes_on_in_join() -> None:
    """A rank that is through takes part in it."""

    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], str, int]:
        algorithm = timed(TopK(Odd(), communicator=communicator, only_if_faster=True, **EVERYTHING), **SLOWER)
        with algorithm.join():
            train(communicator, algorithm, steps=8 + 32 * communicator.rank)
        return [p.detach().clone() for p in algorithm.parameters()], algorithm.stats().trial, algorithm.stats().steps

    first, second = run_ranks(2, rank)
    assert first[1:] == second[1:] == ("plain", 40)
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))


def test_switch_begins_another_trial() -> None:
    def rank(communicator: Communicator) -> tuple[str, str]:
        model = timed(ByteGrad(Odd(), communicator=communicator, only_if_faster=True), **SLOWER)
        train(communicator, model, steps=STEPS)
        before = model.stats().trial
        model = timed(model.switch_to(PowerSGD, only_if_faster=True, min_compression=0.5), **FASTER)
        assert model.stats().trial == ""
        train(communicator, model, steps=STEPS)
        return before, model.stats().trial

    assert run_ranks(2, rank) == [("plain", "compressed")] * 2


def test_without_compression_there_is_no_trial() -> None:
    """Nor on one rank; and none is begun as long as there is nothing to compress."""

    def rank(communicator: Communicator) -> list[str]:
        made = [
            CompressedAllReduce(Odd(), communicator=communicator, codec=None, only_if_faster=True),
            TopK(Odd(), communicator=communicator, only_if_faster=True, min_numel=10**6),
            PowerSGD(Odd(), communicator=communicator, only_if_faster=True, min_compression=1e6),
            ByteGrad(Odd(), communicator=communicator),
        ]
        for algorithm in made:
            train(communicator, algorithm, steps=3)
        return [algorithm.stats().trial for algorithm in made]

    for size in (1, 2):
        assert run_ranks(size, rank) == [[""] * 4] * size


def test_who_has_no_trial() -> None:
    def rank(communicator: Communicator) -> None:
        with pytest.raises(ValueError, match="leave out only_if_faster, or majority_vote"):
            SignSGD(Odd(), communicator=communicator, majority_vote=True, only_if_faster=True)
        with pytest.raises(TypeError, match="only_if_faster"):
            GradientAllReduce(Odd(), communicator=communicator, only_if_faster=True)
        policy = from_spec("topk:only_if_faster=true", Odd(), communicator=communicator).policy
        assert isinstance(policy, OnlyIfFaster)

    run_ranks(1, rank)


def test_nothing_but_numbers_on_a_board() -> None:
    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            assert isinstance(value, int | float), name

    def rank(communicator: Communicator) -> None:
        train(communicator, ByteGrad, steps=1, only_if_faster=True)[1].stats().write(Writer(), 1)

    run_ranks(2, rank)


def test_schedules_are_tried_with_what_they_end_with() -> None:
    plan = Assignment.make({0: "minmax_uint8", 40: "absmax_int4"}, groups={"*": {50: "sign"}})
    assert plan.last_start == 50

    def rank(communicator: Communicator) -> tuple[str, str]:
        algorithm = CompressedAllReduce(
            Odd(), communicator=communicator, codec={0: "minmax_uint8", 3: "absmax_int4"}, only_if_faster=True
        )
        train(communicator, algorithm, 3)
        before = algorithm.stats().trial
        train(communicator, algorithm, 1, first=3)
        return before, algorithm.stats().trial

    assert run_ranks(2, rank) == [("", "running")] * 2
