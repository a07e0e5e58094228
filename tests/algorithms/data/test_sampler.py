"""Samplers of samples: complete, balanced, the same order for any number of ranks, and resumed where they were."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from bagua_kernels.algorithms import LoadBalancingDistributedSampler
from bagua_kernels.algorithms.data.order import CostOrder, run_of
from tests.algorithms.data.common import Lengths, heavy_tailed, samplers


@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=60),
    ranks=st.integers(1, 9),
    run=st.integers(1, 70),
    level=st.sampled_from([0.0, 0.1, 1.0]),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 3),
)
def test_each_sample_comes_once(
    costs: list[int], ranks: int, run: int, level: float, shuffle: bool, seed: int, epoch: int
) -> None:
    made = samplers(Lengths(costs), ranks, run=run, random_level=level, shuffle=shuffle, seed=seed)
    for one in made:
        one.set_epoch(epoch)
    drawn = [list(one) for one in made]
    steps = -(-len(costs) // ranks)
    assert [len(one) for one in drawn] == [steps] * ranks == [len(one) for one in made]
    order = [index for step in zip(*drawn, strict=True) for index in step]
    assert sorted(order[: len(costs)]) == list(range(len(costs)))
    if len(costs) >= ranks:  # padded with those before the end, last first
        padding = order[len(costs) :]
        assert padding == order[: len(costs)][::-1][: len(padding)]


@given(samples=st.integers(1, 60), ranks=st.integers(1, 9), seed=st.integers(0, 99))
def test_left_out(samples: int, ranks: int, seed: int) -> None:
    data = Lengths(range(1, samples + 1))
    if samples < ranks:
        with pytest.raises(ValueError, match=f"a sample for each of {ranks} ranks, got {samples}"):
            samplers(data, ranks, drop_last=True)
        return
    drawn = [list(one) for one in samplers(data, ranks, drop_last=True, seed=seed)]
    assert {len(one) for one in drawn} == {samples // ranks}
    assert len({*itertools.chain(*drawn)}) == samples // ranks * ranks


def test_the_order_is_that_of_seed_and_epoch_alone() -> None:
    data = heavy_tailed(240)

    def order(ranks: int, seed: int, epoch: int) -> list[int]:
        made = samplers(data, ranks, seed=seed)
        for one in made:
            one.set_epoch(epoch)
        return [index for step in zip(*made, strict=True) for index in step]

    first = order(1, 3, 5)
    assert all(order(ranks, 3, 5) == first for ranks in (2, 3, 4, 5, 8))
    assert order(2, 3, 6) != first != order(2, 4, 5)


def test_samples_of_equal_cost_are_shuffled() -> None:
    """Equal costs are the plain case: a random order, in which neighbours in the dataset are no neighbours."""
    (one,) = samplers(Lengths([2] * 4800), 1)
    order = list(one)
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(order)) < 20
    one.set_epoch(1)
    assert sum(a == b for a, b in zip(order, one, strict=True)) < 20


def test_without_shuffle_costs_ascend() -> None:
    (one,) = samplers(Lengths([3, 1, 2, 1]), 1, shuffle=False)
    assert list(one) == [1, 3, 2, 0]
    one.set_epoch(1)
    assert list(one) == [1, 3, 2, 0]


@pytest.mark.parametrize("level", [0.0, 0.05, 1.0])
def test_places_move_by_a_part_of_all(level: float) -> None:
    costs = np.random.default_rng(0).permutation(10_000).astype(np.float64)
    order = CostOrder(costs + 1, level).draw(np.random.default_rng(1))
    moved = np.abs(costs[order] - np.arange(len(costs)))
    assert sorted(order) == list(range(len(costs)))
    assert moved.max() <= level * len(costs)
    if level == 1:
        # Places plus uniform numbers up to all of them: the mean move is by 1/6 of all places or more.
        assert moved.mean() > len(costs) / 7


def steps_cost(lengths: np.ndarray, drawn: list[list[int]]) -> float:
    costs = lengths[np.array(drawn)]
    return float((costs.max(0) / costs.mean(0)).mean())


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_steps_are_balanced(ranks: int) -> None:
    """In steps of one sample, and of batches of eight."""
    data = heavy_tailed(2830)
    ours = [list(one) for one in samplers(data, ranks)]
    theirs = [[*DistributedSampler(data, ranks, rank, seed=1)] for rank in range(ranks)]  # type: ignore[arg-type]
    assert steps_cost(data.lengths, ours) <= 1.05
    assert steps_cost(data.lengths, theirs) >= (1.3 if ranks > 2 else 1.25)

    def batches(drawn: list[list[int]]) -> float:
        sums = data.lengths[np.array(drawn)[:, : len(drawn[0]) // 8 * 8]].reshape(ranks, -1, 8).sum(2)
        return float((sums.max(0) / sums.mean(0)).mean())

    assert batches(ours) <= 1.05 < batches(theirs)


@settings(max_examples=25)
@given(
    samples=st.integers(1, 80),
    before=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 10)), min_size=1, max_size=3),
    after=st.integers(1, 5),
    drop_last=st.booleans(),
)
def test_resumed_on_other_ranks(samples: int, before: list[tuple[int, int]], after: int, drop_last: bool) -> None:
    data, state, seen = Lengths(range(1, samples + 1)), None, []
    if drop_last and samples < max(after, *(ranks for ranks, _ in before)):
        return
    for ranks, steps in [*before, (after, samples)]:
        made = samplers(data, ranks, drop_last=drop_last)
        states = []
        for one in made:
            if state is not None:
                one.load_state_dict(state)
            one.set_epoch(0)
            left = len(one)
            seen += (mine := list(itertools.islice(one, steps)))
            assert len(mine) == min(steps, left)
            states.append(one.state_dict())
        assert all(each == states[0] for each in states)
        state = states[0]
    counts = np.bincount(seen, minlength=samples)
    most = max(after, *(ranks for ranks, _ in before))
    if drop_last:
        assert counts.max() == 1
        assert (counts == 0).sum() < most * (len(before) + 1)
    else:
        assert counts.min() == 1
        assert counts.sum() - samples < most * (len(before) + 1)


@pytest.mark.parametrize("drop_last", [False, True])
def test_another_number_of_ranks_has_another_end(drop_last: bool) -> None:
    """Ten samples: four ranks would repeat or leave out two of them, but two ranks take over before."""
    data, seen = Lengths(range(1, 11)), []
    for one in samplers(data, 4, drop_last=drop_last):
        seen += list(itertools.islice(one, 1))
        state = one.state_dict()
    for one in samplers(data, 2, drop_last=drop_last):
        one.load_state_dict(state)
        seen += list(one)
    assert sorted(seen) == list(range(10))


def test_resumed_is_uninterrupted() -> None:
    data = heavy_tailed(500)
    one, other = samplers(data, 2), samplers(data, 2)
    for rank in range(2):
        one[rank].set_epoch(3)
        whole = list(one[rank])
        one[rank].set_epoch(4)
        behind = list(one[rank])
        one[rank].set_epoch(3)
        assert list(itertools.islice(one[rank], 70)) == whole[:70]
        other[rank].load_state_dict(one[rank].state_dict())
        assert list(other[rank]) == whole[70:]
        other[rank].set_epoch(4)
        assert list(other[rank]) == behind
        other[rank].set_epoch(3)
        assert list(other[rank]) == whole


def test_states_before_and_after() -> None:
    (one,) = samplers(Lengths([1, 2, 3]), 1)
    assert one.state_dict()["history"] == [[1, 0]]
    assert len(list(one)) == 3
    (other,) = samplers(Lengths([1, 2, 3]), 1)
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
    assert list(other) == []
    assert len(list(other)) == 3
    one.set_epoch(1)
    assert one.state_dict() == {"epoch": 1, "seed": 0, "history": []}
    with pytest.raises(ValueError, match="saved with seed=0, but this sampler has seed=1"):
        samplers(Lengths([1, 2, 3]), 1, seed=1)[0].load_state_dict(one.state_dict())


def test_a_loader_with_workers_draws_ahead() -> None:
    data = Lengths(range(1, 41))
    (one,) = samplers(data, 1)
    loader: DataLoader[int] = DataLoader(data, 2, sampler=one, num_workers=1)  # type: ignore[arg-type]
    batches = iter(loader)
    seen = [int(length) for _ in range(3) for length in next(batches)]
    assert one.state_dict()["history"][0][1] > 6
    (other,) = samplers(data, 1)
    other.load_state_dict(one.state_dict(steps=6))
    assert sorted(seen + [int(data.lengths[index]) for index in other]) == list(range(1, 41))
    list(batches)
    with pytest.raises(ValueError, match="expected steps from 0 to the 40 that were yielded, got 41"):
        one.state_dict(steps=41)


def test_costs_from_a_function_a_column_and_values() -> None:
    data = Lengths([4, 1, 3, 2])
    made = [
        LoadBalancingDistributedSampler(data, complexity, 1, 0, shuffle=False)
        for complexity in (lambda sample: sample, "length", [4, 1, 3, 2], torch.tensor([4, 1, 3, 2]))
    ]
    assert all(list(one) == [1, 3, 2, 0] for one in made)


def test_refusals() -> None:
    data = Lengths([4, 1])
    for costs in ([1, 0], [1, -1], [1, float("nan")], [float("inf"), 1]):
        with pytest.raises(ValueError, match=r"positive and finite, got .* for sample [01] and 0 more"):
            LoadBalancingDistributedSampler(data, costs)
    with pytest.raises(ValueError, match=r"each of 2 samples, got an array of shape \(3,\)"):
        LoadBalancingDistributedSampler(data, [1, 2, 3])
    with pytest.raises(TypeError, match="a dataset with a length, got generator"):
        LoadBalancingDistributedSampler((x for x in (1, 2)), [1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a rank from 0 to num_replicas - 1, got 2 of 2"):
        LoadBalancingDistributedSampler(data, [1, 2], 2, 2)
    for name, value in {"random_level": 1.5, "run": 0}.items():
        with pytest.raises(ValueError, match=name):
            LoadBalancingDistributedSampler(data, [1, 2], **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a sample for each of 1 ranks, got 0"):
        LoadBalancingDistributedSampler(Lengths([]), [])


def test_ranks_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    one = LoadBalancingDistributedSampler(Lengths([1, 2, 3]), "length")
    assert (one.num_replicas, one.rank) == (3, 1)


def test_default_runs() -> None:
    assert [run_of(samples) for samples in (1, 2830, 12_000, 10**7)] == [24, 24, 120, 960]
