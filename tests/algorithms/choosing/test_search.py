"""The choice as a machine of states, driven by numbers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from bagua_kernels.algorithms.choosing.elsewhere import faster
from bagua_kernels.algorithms.choosing.search import EXACT_STEPS, TRIES, WINDOW, Search
from bagua_kernels.algorithms.choosing.turns import BLOCK

PREDICTED = {"plain": 1.0, "a": 0.5, "b": 0.6, "c": 0.7, "d": 0.72, "e": 0.9}


def measured() -> Search:
    search = Search("plain")
    counted = 0
    while not search.measured:
        counted += search.counts
        search.note()
    assert counted == EXACT_STEPS - 1
    return search


def tried(search: Search, seconds: Callable[[str], float]) -> list[str]:
    """Goes through a trial; returns what averaged gradients in each step."""
    seen = []
    while search.state == "trying":
        seen.append(search.current)
        search.took(seconds(search.current))
    return seen


def test_the_best_predicted_take_turns_and_the_fastest_goes_on() -> None:
    search = measured()
    search.begin(PREDICTED)
    times = {"a": 0.9, "b": 0.3, "c": 0.8}
    seen = tried(search, times.__getitem__)
    assert seen == ["a"] * BLOCK + ["b"] * BLOCK + ["c"] * 2 * BLOCK + ["b"] * BLOCK + ["a"] * BLOCK
    assert (search.state, search.current) == ("chosen", "b")
    assert {label: len(one) for label, one in search.tried.items()} == dict.fromkeys("abc", 2 * (BLOCK - 1))
    assert EXACT_STEPS + len(seen) <= 40


def test_the_first_step_of_a_turn_is_not_counted() -> None:
    search = measured()
    search.begin(PREDICTED)
    steps = iter(range(1000))
    tried(search, lambda label: 100.0 if next(steps) % BLOCK == 0 else PREDICTED[label])
    assert search.current == "a"
    assert 100.0 not in search.tried["b"]


def test_exact_means_are_tried_where_they_are_near() -> None:
    search = measured()
    search.begin({**PREDICTED, "plain": 0.74})
    assert list(search.tried) == ["a", "b", "c", "plain"]
    tried(search, {"a": 0.9, "b": 0.8, "c": 0.8, "plain": 0.7}.__getitem__)
    assert search.current == "plain"
    assert EXACT_STEPS + 4 * 2 * BLOCK <= 40


def test_what_is_predicted_to_be_slow_is_not_tried() -> None:
    search = measured()
    search.begin({"plain": 1.0, "a": 0.1, "b": 0.2})
    assert (search.state, search.current) == ("chosen", "a")
    assert "1.5 times as fast" in search.reason


@pytest.mark.parametrize(("seconds", "expected"), [(0.94, "b, other"), (0.98, "b")])
def test_variations_of_the_fastest_are_tried(seconds: float, expected: str) -> None:
    """One has to be 5 % faster, or the difference is noise."""
    search = measured()
    search.variations = {"a": ["a, other"], "b": ["b, other", "b, third"]}
    search.begin(PREDICTED)
    times = {"a": 0.9, "b": 0.3, "c": 0.8, "b, other": 0.3 * seconds, "b, third": 0.4}
    seen = tried(search, times.__getitem__)
    assert seen[3 * 2 * BLOCK :] == ["b"] * BLOCK + ["b, other"] * BLOCK + ["b, third"] * BLOCK
    assert (search.state, search.current) == ("chosen", expected)
    assert EXACT_STEPS + len(seen) <= 60
    # Of one that is far ahead, too.
    search.begin({"plain": 1.0, "b": 0.1})
    assert tried(search, times.__getitem__) == ["b"] * BLOCK + ["b, other"] * BLOCK + ["b, third"] * BLOCK
    assert search.current == expected


def chosen() -> Search:
    search = measured()
    search.begin(PREDICTED)
    tried(search, PREDICTED.__getitem__)
    return search


def windows(search: Search, paces: list[float]) -> list[bool]:
    found = []
    for pace in paces:
        assert [search.rest() for _ in range(WINDOW)] == [False] * (WINDOW - 1) + [True]
        found.append(search.drifted(pace, 0.05))
    return found


def test_a_lasting_change_opens_the_choice_again() -> None:
    search = chosen()
    assert windows(search, [1.0, 1.2, 0.9, 10.0]) == [False] * 4
    assert windows(search, [1.0, 10.0]) == [False] * 2  # one window alone is none
    assert windows(search, [10.0]) == [True]
    assert search.slower == pytest.approx(10.0)
    search.begin(PREDICTED)
    tried(search, PREDICTED.__getitem__)
    assert windows(search, [10.0, 10.0]) == [False, False]
    # Faster counts, too.
    assert windows(search, [1.0, 1.0]) == [False, True]
    assert search.slower == pytest.approx(1.0)


def test_within_a_hundred_steps() -> None:
    """Links change just after a window has begun."""
    search = chosen()
    windows(search, [1.0])
    search.rest()
    steps = 0
    while True:
        steps += 1
        if search.rest() and search.drifted(10.0, 1.0):
            break
    assert steps <= 100


def test_saved_and_loaded() -> None:
    for search in (measured(), chosen()):
        other = Search("plain")
        other.load(json.loads(json.dumps(search.save())))
        assert other.save() == search.save()
    search = measured()
    search.begin(PREDICTED)
    search.took(1.0)
    other = Search("plain")
    other.load(search.save())
    # A trial begins anew.
    assert other.state == "trying"
    assert other.current == "a"
    assert other.tried == {"a": [], "b": [], "c": []}


def test_numbers_of_tries() -> None:
    assert TRIES == 3


def test_what_is_faster_elsewhere() -> None:
    search = measured()
    search.begin(PREDICTED)
    tried(search, {"a": 1.0, "b": 0.6, "c": 0.7}.__getitem__)
    # Predictions are half of what steps take: the best of 0.6 s stands for 0.3.
    assert faster({"near": 0.29}, search) == ""
    assert faster({"far": 0.2}, search) == "far"
    # The first of those that are as good as equal.
    assert faster({"gentle": 0.205, "best": 0.2, "slow": 0.9}, search) == "gentle"
    assert faster({}, search) == ""
    search.begin({"plain": 1.0, "a": 0.1})  # without a trial
    assert faster({"near": 0.098}, search) == ""
    assert faster({"far": 0.09}, search) == "far"
