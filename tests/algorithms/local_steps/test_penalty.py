"""Weights by norms: who is left out, and what comes of the mean."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels.algorithms import DiLoCo, LocalSGD, Penalty
from bagua_kernels.algorithms.local_steps.penalty import Norms, clip_factor, weights_of
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.gossip.common import flat
from tests.grids import grid

# It tells of what it does.
pytestmark = pytest.mark.filterwarnings("ignore:the penalty:RuntimeWarning")

N = 50


class Moved(torch.nn.Module):
    """A vector whose gradient is what the test gives."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(N))

    def forward(self) -> torch.Tensor:
        return self.x


def moves(rank: int, step: int, lengths: Any) -> np.ndarray:
    """What a rank adds to its parameters in a step: a direction of its own, of the length that is given."""
    direction = np.random.default_rng([rank, step]).normal(size=N)
    return direction / np.linalg.norm(direction) * lengths(rank, step)


def run(size: int, rounds: int, lengths: Any, kind: Any = LocalSGD, **options: Any) -> list[list[torch.Tensor]]:
    """Trains with given steps; returns each rank's parameters after each round of one step."""

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        module = Moved()
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        model = kind(module, optimizer, interval=1, communicator=communicator, **options)
        seen = []
        for step in range(rounds):
            model()
            module.x.grad = -torch.from_numpy(moves(communicator.rank, step, lengths)).float()
            optimizer.step()
            model.wait()
            seen.append(flat(module))
        model.close()
        return seen

    return run_ranks(size, rank)


def simulated(size: int, rounds: int, lengths: Any, penalty: Penalty) -> list[np.ndarray]:
    """The formulas of the class's docstring in float64."""
    x, seen = np.zeros(N), []
    history: list[list[float]] = [[] for _ in range(size)]
    for step in range(rounds):
        ds = [-moves(rank, step, lengths) for rank in range(size)]
        weights = []
        for rank, d in enumerate(ds):
            norm, past = float(np.linalg.norm(d)), history[rank]
            mean, deviation = (np.mean(past), np.std(past)) if past else (0.0, 0.0)
            out = len(past) >= penalty.warmup and norm - mean > penalty.threshold * deviation
            if not out:
                past.append(norm)
            weights.append(0.0 if out else math.exp(-norm))
        d = sum((w * each for w, each in zip(weights, ds, strict=True)), np.zeros(N)) / (sum(weights) or 1.0)
        length = float(np.linalg.norm(d))
        if penalty.clip is not None and length > penalty.clip:
            d = d * penalty.clip / length
        x = x - d
        seen.append(x.copy())
    return seen


def spike(rank: int, step: int) -> float:
    """Steps of about one, and in round 8 a hundred times as much on rank 1."""
    return (1 + 0.1 * rank + 0.05 * (step % 3)) * (100.0 if (rank, step) == (1, 8) else 1.0)


# Smoothing only begins to differ from a plain mean when its rate is the greater one.
@grid(cover=1, clip=[None, 0.4], size=[2, 3])
def test_as_the_formulas(size: int, clip: float | None) -> None:
    penalty = Penalty(warmup=4, clip=clip)
    everyone = run(size, 12, spike, penalty=penalty)
    expected = simulated(size, 12, spike, penalty)
    for seen in everyone:
        for ours, reference, first in zip(seen, expected, everyone[0], strict=True):
            assert torch.equal(ours, first)
            assert np.abs(ours.double().numpy() - reference).max() <= 1e-5


def test_a_spike_moves_nothing() -> None:
    """Without the penalty it does."""
    jump = {}
    for name, penalty in (("with", Penalty(warmup=4)), ("without", None)):
        seen = run(2, 10, spike, penalty=penalty)[0]
        jump[name] = float((seen[8] - seen[7]).norm())
    assert jump["with"] < 2.0
    assert jump["without"] > 40.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_on_its_rank(bad: float) -> None:
    """Even in the first round, and the rank goes on with what the others have."""
    seen = run(3, 3, lambda rank, step: bad if (rank, step) == (2, 0) else 1.0, penalty=Penalty(clip=None))
    for each in seen:
        assert all(torch.isfinite(x).all() for x in each)
        assert all(torch.equal(x, y) for x, y in zip(each, seen[0], strict=True))


def test_if_all_are_left_out_the_round_is_undone() -> None:
    seen = run(2, 10, lambda rank, step: 100.0 if step == 8 else 1 + 0.1 * (step % 2), penalty=Penalty(warmup=4))[0]
    assert torch.equal(seen[8], seen[7])
    assert not torch.equal(seen[9], seen[8])


def test_equal_norms_are_the_plain_mean_bit_for_bit() -> None:
    """Weights are equal then, and nothing is multiplied: norms of powers of two, in one element each."""

    def lengths(rank: int, step: int) -> float:
        return 1.0

    plain, weighed = (
        run(4, 3, lengths, DiLoCo, penalty=p) for p in (None, Penalty(clip=None, threshold=1e9, smoothing=1.0))
    )
    for a, b in zip(plain, weighed, strict=True):
        assert all(torch.allclose(x, y, rtol=1e-5, atol=1e-7) for x, y in zip(a, b, strict=True))
    assert weights_of([2.0, 2.0, 2.0]) == [1.0, 1.0, 1.0]


def test_small_parts() -> None:
    assert weights_of([1.0, math.inf, 2.0]) == [1.0, 0.0, math.exp(-1.0)]
    assert weights_of([1e6, 1e6 + 1]) == [1.0, pytest.approx(math.exp(-1.0))]
    assert weights_of([math.inf, math.inf]) == [0.0, 0.0]
    assert (clip_factor(5.0, None), clip_factor(5.0, 10.0), clip_factor(20.0, 10.0)) == (1.0, 1.0, 0.5)
    norms, again = Norms(Penalty(warmup=2)), Norms(Penalty(warmup=2))
    assert [norms.judged(x) for x in (1.0, 1.2, 1.1, 9.0, 1.1)] == [1.0, 1.2, 1.1, math.inf, 1.1]
    again.load(norms.numbers())
    assert [norms.judged(x) for x in (1.3, 2.0)] == [again.judged(x) for x in (1.3, 2.0)]


@pytest.mark.parametrize(
    "wrong", [{"threshold": 0.0}, {"smoothing": 0.0}, {"smoothing": 1.5}, {"warmup": -1}, {"clip": 0}]
)
def test_numbers_that_do_not_fit(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Penalty(**wrong)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_mean_and_variance_are_those_of_weighted_norms(count: int) -> None:
    """The newest of 1/smoothing or fewer norms weighs as the rate says, each older one as what newer ones leave of it."""
    smoothing, norms = 0.1, np.random.default_rng(count).uniform(1, 9, count)
    found = Norms(Penalty(threshold=1e9, smoothing=smoothing, warmup=count))
    weights = np.zeros(count)
    for place, norm in enumerate(norms):
        assert found.judged(norm) == norm
        rate = max(smoothing, 1 / (place + 1))
        weights *= 1 - rate
        weights[place] = rate
    mean = weights @ norms
    assert weights.sum() == pytest.approx(1)
    assert found.numbers()["mean"] == pytest.approx(mean)
    assert found.numbers()["variance"] == pytest.approx(weights @ (norms - mean) ** 2)


def test_resumed_bit_for_bit() -> None:
    """With the moving means of the norms: they decide who is left out."""

    def rank(communicator: Communicator, stops: tuple[int, ...]) -> torch.Tensor:
        state: Any = None
        begin = 0
        for end in stops:
            module = Moved()
            optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
            model = LocalSGD(
                module, optimizer, interval=1, communicator=communicator.duplicate(), penalty=Penalty(warmup=4)
            )
            if state is not None:
                model.load_algorithm_state_dict(state)
            for step in range(begin, end):
                model()
                module.x.grad = -torch.from_numpy(moves(communicator.rank, step, spike)).float()
                optimizer.step()
            state, begin = model.algorithm_state_dict(), end
            model.close()
        return flat(module)

    whole, resumed = (run_ranks(2, rank, stops) for stops in ((12,), (7, 12)))
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


@grid(cover=1, warmup=[0, 1, 10], size=[2, 3])
def test_norms_that_have_risen_for_good_are_usual_again(warmup: int, size: int) -> None:
    """After the rounds that `Penalty` names, whatever there was before; told once, and counted."""

    def rank(communicator: Communicator) -> Any:
        module = Moved()
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        model = LocalSGD(module, optimizer, interval=1, communicator=communicator, penalty=Penalty(warmup=warmup))
        still, before = [], flat(module)
        for step in range(45):
            model()
            length = (3.0 if step >= 20 else 1.0) * (1 + 0.02 * ((7 * step) % 5))
            module.x.grad = -torch.from_numpy(moves(communicator.rank, step, lambda *_, length=length: length)).float()
            optimizer.step()
            model.wait()
            still.append(torch.equal(before, flat(module)))
            before = flat(module)
        guards = model.stats().guards
        model.close()
        return still, guards

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        everyone = run_ranks(size, rank)
    for still, guards in everyone:
        assert guards["void"] == sum(still)
        assert guards["left out"] >= sum(still)
        assert guards["restarted"] >= 1
        assert all(still[20:23])
        assert sum(still[23:]) <= 3
        assert sum(still[:20]) <= (0 if warmup == 10 else 6)
    texts = [str(each.message) for each in told if "penalty" in str(each.message)]
    # Two kinds on each rank, and one on the first only.
    assert len(texts) == 2 * size + 1
    assert len([text for text in texts if "all ranks" in text]) == 1


def test_the_first_norms_are_not_judged() -> None:
    """Even without a warm-up one norm has no deviation, and what is not finite never takes part."""
    norms = Norms(Penalty(warmup=0, patience=2))
    assert [norms.judged(x) for x in (1.0, 1.5, math.nan, math.inf, 1.4)] == [1.0, 1.5, math.inf, math.inf, 1.4]
    assert [norms.judged(x) for x in (9.0, math.nan, 9.5, 9.2)] == [math.inf, math.inf, math.inf, 9.2]
    assert (norms.left_out, norms.restarts) == (5, 1)
    assert norms.numbers()["count"] == 3
    assert norms.numbers()["mean"] == pytest.approx((9.0 + 9.5 + 9.2) / 3)


@pytest.mark.parametrize("after", [1, 2, 3, 4, 5])
def test_norms_resume_while_they_are_left_out(after: int) -> None:
    """A checkpoint has those that may become usual."""
    given = [1.0, 1.1, 9.0, 9.5, 9.2, 9.1, 30.0, 9.1]
    whole, first, second = (Norms(Penalty(warmup=0, patience=2)) for _ in range(3))
    expected = [whole.judged(x) for x in given]
    found = [first.judged(x) for x in given[:after]]
    second.load(first.numbers())
    assert found + [second.judged(x) for x in given[after:]] == expected
    assert second.numbers() == whole.numbers()


def test_patience_is_at_least_one_round() -> None:
    with pytest.raises(ValueError, match="patience"):
        Penalty(patience=0)
