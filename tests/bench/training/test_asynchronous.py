"""Averages beside training: what the benchmarks of times and of costs make of what they measure."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
from rich.console import Console

from bagua_kernels.comm import Communicator, run_ranks
from bench.training import activation, asynchronous, stragglers
from bench.training.rivals import ASYNCHRONOUS, Rival


def test_the_model_of_time() -> None:
    """Two ranks that are late in turn: all-reduce waits each time, a period for their sum."""
    even = [1.0 if step % 2 else 2.0 for step in range(stragglers.STEPS)]
    odd = [2.0 if step % 2 else 1.0 for step in range(stragglers.STEPS)]
    assert stragglers.model_ratio([even, odd]) == pytest.approx(2.0 / 1.5)


def test_waits_count_what_the_group_still_owed() -> None:
    log = [[0, [0, 1], 0.0, 0.1], [1, [0, 1], 1.0, 1.1], [2, [0, 1], 2.0, 2.1]]
    found = [
        {"waits": [[0, 0.0, 0.1], [2, 0.95, 1.2]], "log": log},
        {"waits": [[1, 1.0, 0.1]], "log": log},
    ]
    told = stragglers.waits(found)
    assert told["exchange_ms"] == pytest.approx(100)
    assert told["longest_wait_ms"] == pytest.approx(1200)
    # Version 1 was owed when the wait began: two exchanges and the slack are 0.21 s.
    assert told["beyond_the_limit"] == 1
    assert told["furthest_beyond_ms"] == pytest.approx(990)


def test_latencies_are_those_of_late_ranks_in_backward() -> None:
    """Not of ranks that had come there themselves, were not in a backward pass, or owed an earlier version."""
    members = {"0": [0, 1], "1": [0, 1], "2": [0, 1], "3": [0, 1]}
    rank_0 = {
        "arrived": {"0": 1.0, "1": 2.0, "2": 3.0, "3": 4.0},
        "reads": {str(v): (v + 1.0, False) for v in range(4)},
    }
    reads = {"0": (1.25, True), "1": (2.5, False), "2": (3.05, True), "3": (4.5, True)}
    rank_1 = {"arrived": {"0": 1.6, "2": 3.01}, "reads": reads}
    told = {"ranks": [{**each, "members": members, "seconds": 1.0, "period": 10} for each in (rank_0, rank_1)]}
    (row,) = activation.described({**told, "load_average": 0.0}, "tr")
    assert row["reads"] == 2
    assert row["median_ms"] == pytest.approx(375)
    assert row["p95_steps"] == pytest.approx(0.5)
    text = io.StringIO()
    activation.show(Console(file=text, width=150), [row])
    assert "375.0" in text.getvalue()


class Counted(Rival):
    """Counts steps in place of taking them."""

    def __init__(self) -> None:
        self.algorithm: Any = None
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


def test_blocks_and_what_is_made_of_them() -> None:
    def rank(communicator: Communicator) -> Any:
        rivals: dict[str, Rival] = {"alone": Counted(), "other": Counted()}
        return asynchronous.blocks(communicator, rivals, 2, 8, random.Random(0)), rivals["other"].steps  # type: ignore[attr-defined]

    for (taken, waiting, rounds), steps in run_ranks(2, rank):
        assert [len(each) for each in taken.values()] == [2, 2]
        assert steps == 24
        assert waiting == {"alone": [], "other": []}
        assert rounds == {"alone": 0, "other": 0}
    assert {*asynchronous.MOST, "wagma"} == set(ASYNCHRONOUS)
    told = {
        "times": {"alone": [0.2, 0.2, 0.4], "async 8 bits": [0.22, 0.2, 0.6], "async float32": [0.3, 0.2, 0.4]},
        "waiting": {"async 8 bits": [0.01, 0.03], "async float32": [0.0]},
        "rounds": {"async 8 bits": 4, "async float32": 9},
        "load_average": 0.5,
    }
    (row,) = asynchronous.described(told, "tr")
    assert [bar["ratio"] for bar in row["bars"]] == pytest.approx([1.1, 1.0])
    assert row["bars"][0]["waiting"] == pytest.approx(0.02)
    text = io.StringIO()
    asynchronous.show(Console(file=text, width=150), [row])
    assert "async float32" in text.getvalue()
