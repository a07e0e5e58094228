"""Turns by themselves: which candidate a step has, which steps count, and what the slowest rank makes of them."""

from __future__ import annotations

import pytest

from bagua_kernels.algorithms.choosing.turns import BLOCK, Turns, there_and_back


def taken(turns: Turns) -> list[str]:
    """Takes all steps, each as many seconds as there were before it; returns the candidates."""
    found = []
    while not turns.ended:
        found.append(turns.current)
        turns.took(float(len(found) - 1))
    return found


@pytest.mark.parametrize("uncounted", [0, 1])
def test_all_but_the_first_step_of_a_turn_count(uncounted: int) -> None:
    turns = Turns(["a", "b", "a"], {"a": [], "b": []}, uncounted)
    assert taken(turns) == ["a"] * BLOCK + ["b"] * BLOCK + ["a"] * BLOCK
    first = [] if uncounted else [1.0, 2.0, 3.0]
    assert turns.times == {"a": [*first, 9.0, 10.0, 11.0], "b": [5.0, 6.0, 7.0]}
    assert turns.seconds == [*turns.times["a"], *turns.times["b"]]
    assert turns.medians == {"a": 10.0 if uncounted else 6.0, "b": 6.0}


def test_the_first_of_equals_is_the_fastest() -> None:
    """A drift of the machine counts alike for both."""
    turns = Turns(there_and_back(["b", "a"]), {"a": [], "b": []})
    assert taken(turns) == ["b"] * BLOCK + ["a"] * 2 * BLOCK + ["b"] * BLOCK
    assert turns.medians == {"a": 8.0, "b": 8.0}
    assert turns.fastest == "a"


def test_the_slowest_rank_of_each_step_counts() -> None:
    turns = Turns(["a", "b"], {"a": [], "b": []})
    taken(turns)
    turns.use_slowest([turns.seconds, [9.0, 0.0, 0.0, 0.0, 0.0, 8.0]])
    assert turns.times == {"a": [9.0, 2.0, 3.0], "b": [5.0, 6.0, 8.0]}
    assert turns.fastest == "a"


def test_what_has_no_turn_has_no_median() -> None:
    turns = Turns([], {"a": []})
    assert turns.ended
    assert turns.medians == {}
