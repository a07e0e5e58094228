"""Batches of equal cost: below their cap, complete, as many on each rank, and faster than random ones."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from bagua_kernels import algorithms
from bagua_kernels.algorithms import LoadBalancingDistributedBatchSampler
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.data.common import Lengths, batch_samplers, heavy_tailed, samplers
from tests.grids import grid


def cost_of(costs: np.ndarray, padded: bool) -> float:
    return float(costs.max() * len(costs) if padded else costs.sum())


CASES: dict[str, Any] = {
    "costs": st.lists(st.integers(1, 30), min_size=1, max_size=80),
    "ranks": st.integers(1, 6),
    "cap": st.integers(30, 200),
    "padded": st.booleans(),
    "most": st.sampled_from([None, 1, 3]),
    "drop_last": st.booleans(),
    "level": st.sampled_from([0.0, 0.3, 1.0]),
    "shuffle": st.booleans(),
    "seed": st.integers(0, 99),
}


@given(**CASES)
def test_batches(
    costs: list[int],
    ranks: int,
    cap: int,
    padded: bool,
    most: int | None,
    drop_last: bool,
    level: float,
    shuffle: bool,
    seed: int,
) -> None:
    data, options = Lengths(costs), {"random_level": level, "shuffle": shuffle, "seed": seed}
    if len(costs) < ranks:
        with pytest.raises(ValueError, match=f"a sample for each of {ranks} ranks, got {len(costs)}"):
            batch_samplers(data, ranks, cap, options, padded=padded)
        return
    made = batch_samplers(data, ranks, cap, options, padded=padded, max_samples=most, drop_last=drop_last)
    drawn = [list(one) for one in made]
    assert len({len(one) for one in drawn}) == 1
    assert len(drawn[0]) == len(made[0]) >= 1
    for batch in itertools.chain(*drawn):
        assert 1 <= len(batch) <= (most or len(costs))
        assert cost_of(data.lengths[batch], padded) <= cap
    counts = np.bincount([*itertools.chain(*itertools.chain(*drawn))], minlength=len(costs))
    # Single samples come again where no batch can be halved.
    single = all(len(batch) == 1 for batch in itertools.chain(*drawn))
    assert counts.max() == 1 or (single and counts.sum() < len(costs) + ranks)
    assert drop_last or counts.min() == 1


def test_batches_are_full() -> None:
    """But for two, the first and the last of the sorted order, and for what is halved at the end."""
    data = heavy_tailed(2000)
    made = batch_samplers(data, 4, 200.0, padded=False)
    sums = np.array([[data.lengths[batch].sum() for batch in one] for one in made])
    assert (sums.max(0) / sums.mean(0))[:-1].mean() < 1.05
    assert (sums[:, :-1] > 200.0 - 85.6).all()


def test_single_samples_come_again_where_no_batch_can_be_halved() -> None:
    made = batch_samplers(Lengths([5, 5, 5]), 2, 5.0)
    drawn = [list(one) for one in made]
    assert sorted(itertools.chain(*itertools.chain(*drawn))) in ([0, 0, 1, 2], [0, 1, 1, 2], [0, 1, 2, 2])


def test_batches_begin_elsewhere_in_each_epoch() -> None:
    (one,) = batch_samplers(Lengths(range(1, 201)), 1, 500.0)
    first = {tuple(batch) for batch in one}
    one.set_epoch(1)
    assert len(first & {tuple(batch) for batch in one}) < len(first) / 2


@settings(max_examples=25)
@given(
    samples=st.integers(6, 80),
    before=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=3),
    after=st.integers(1, 5),
)
def test_resumed_on_other_ranks(samples: int, before: list[tuple[int, int]], after: int) -> None:
    data, state, seen = Lengths(np.arange(samples) % 9 + 1), None, []
    for ranks, steps in [*before, (after, samples)]:
        states = []
        for one in batch_samplers(data, ranks, 20.0):
            if state is not None:
                one.load_state_dict(state)
            seen += [index for batch in itertools.islice(one, steps) for index in batch]
            states.append(one.state_dict())
        assert all(each == states[0] for each in states)
        state = states[0]
    counts = np.bincount(seen, minlength=samples)
    # Single samples at the end of an epoch come again where ranks would have none.
    assert counts.min() == 1
    assert counts.sum() - samples < 5 * (len(before) + 1)


def test_any_cost_with_a_number_of_samples() -> None:
    made = batch_samplers(Lengths([1e-9, 2.0, 3.0, 4.0]), 2, float("inf"), {"shuffle": False}, max_samples=2)
    assert [list(one) for one in made] == [[[0, 1]], [[2, 3]]]


def test_the_epoch_is_the_sampler_s() -> None:
    (sampler,) = samplers(heavy_tailed(300), 1)
    sampler.set_epoch(5)
    one = LoadBalancingDistributedBatchSampler(sampler, 200.0)
    assert one.epoch == sampler.epoch == 5


def test_few_samples_are_not_left_out() -> None:
    made = batch_samplers(Lengths([5, 5, 5]), 3, 20.0, drop_last=True)
    assert sorted(itertools.chain(*itertools.chain(*made))) == [0, 1, 2]


def test_trainers_set_the_sampler_s_epoch() -> None:
    (one,) = batch_samplers(heavy_tailed(300), 1, 200.0)
    one.set_epoch(2)
    second = list(one)
    one.set_epoch(0)
    one.sampler.set_epoch(2)
    assert list(one) == second


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"sample 1 alone costs 7.0, more than max_cost=6: .*there are 1"):
        batch_samplers(Lengths([1, 7]), 1, 6)
    with pytest.raises(ValueError, match="max_cost=nan"):
        batch_samplers(Lengths([1, 7]), 1, float("nan"))
    with pytest.raises(ValueError, match="max_samples has to be at least 1, got 0"):
        batch_samplers(Lengths([1, 7]), 1, 8, max_samples=0)


def grouped_by_length(lengths: np.ndarray, batch: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Batches of a fixed size as trainers group them: random groups of fifty batches, each sorted from long to short."""
    order, group = generator.permutation(len(lengths)), 50 * batch
    parts = [order[begin : begin + group] for begin in range(0, len(order), group)]
    ranked = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])
    return [ranked[begin : begin + batch] for begin in range(0, len(ranked), batch)]


def seconds(lengths: np.ndarray, ranks: list[list[Any]], padded: bool) -> float:
    """Of an epoch whose steps take as long as their dearest rank."""
    costs = np.array([[cost_of(lengths[batch], padded) for batch in one] for one in ranks])
    return float(costs.max(0).sum())


@grid(cover=1, padded=[True, False], sigma=[0.4, 1.0])
def test_throughput_of_two_ranks(padded: bool, sigma: float) -> None:
    """On log-normal lengths: never below grouping by length, and 1.58 times random batches where padding is paid for."""
    generator = np.random.default_rng(0)
    lengths = np.exp(sigma * generator.standard_normal(16_000))
    size = 8
    random = np.split(generator.permutation(len(lengths)), len(lengths) // size)
    grouped = grouped_by_length(lengths, size, generator)
    # As large as random batches are on average, so that no more memory is needed.
    cap = max(size * lengths.mean(), lengths.max())
    ours = [list(one) for one in batch_samplers(Lengths(lengths), 2, cap, padded=padded)]
    by_chance = seconds(lengths, [random[::2], random[1::2]], padded)
    by_length = seconds(lengths, [grouped[::2], grouped[1::2]], padded)
    balanced = seconds(lengths, ours, padded)
    assert balanced <= by_length
    assert by_chance / balanced >= (1.58 if padded else 1.0)


def test_weights_make_the_mean_over_samples() -> None:
    """A gradient of two ranks with batches of different sizes is that of one rank with all of their samples."""
    data = Lengths([1, 1, 1, 6])
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def gradient(communicator: Communicator) -> tuple[list[int], torch.Tensor]:
        model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
        torch.nn.init.ones_(model.weight)
        wrapped = algorithms.GradientAllReduce(model, communicator=communicator)
        sampler = batch_samplers(data, communicator.size, 6.0, {"shuffle": False})[communicator.rank]
        with wrapped:
            (batch,) = itertools.islice(DataLoader(range(4), batch_sampler=sampler), 1)  # type: ignore[arg-type]
            wrapped.weigh(len(batch))
            wrapped(x[batch]).square().mean().backward()
            assert model.weight.grad is not None
            return batch.tolist(), model.weight.grad.clone()

    told = run_ranks(2, gradient)
    together = [index for batch, _ in told for index in batch]
    assert [batch for batch, _ in told] == [[0, 1, 2], [3]]
    expected = (2 * x[together].sum(1, keepdim=True) * x[together]).mean(0, keepdim=True)
    for _, found in told:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@grid(cover=1, samples=[17, 40, 41, 43], ranks=[2, 3, 4], drop_last=[True, False])
def test_resumed_after_any_step(samples: int, ranks: int, drop_last: bool) -> None:
    """What is left of the epoch comes, and after its last step nothing."""
    data = Lengths([5] * samples)
    whole = [list(one) for one in batch_samplers(data, ranks, 20.0, drop_last=drop_last)]
    for steps in range(len(whole[0]) + 1):
        states = []
        for one in batch_samplers(data, ranks, 20.0, drop_last=drop_last):
            iterator = iter(one)
            for _ in range(steps):
                next(iterator)
            states.append(one.state_dict())
        for one, state, expected in zip(
            batch_samplers(data, ranks, 20.0, drop_last=drop_last), states, whole, strict=True
        ):
            one.load_state_dict(state)
            assert len(one) == len(expected) - steps
            assert list(one) == expected[steps:]
        assert all(state == states[0] for state in states)


def test_resumed_at_the_end_on_other_ranks() -> None:
    """What was to be left out stays so, on fewer ranks and on more."""
    data = Lengths([5] * 40)
    states = []
    for one in batch_samplers(data, 4, 20.0, drop_last=True):
        assert len(list(one)) == 2
        states.append(one.state_dict())
    for one in batch_samplers(data, 7, 20.0, drop_last=True):
        one.load_state_dict(states[0])
        assert list(one) == []
