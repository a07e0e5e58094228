"""Local steps on slow lines, and ranks of different speed: what is measured, and what is made of it."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
from rich.console import Console

from bagua_kernels.comm import Communicator, run_ranks
from bench.training import local_steps, unequal
from bench.training.rivals import LOCAL, Rival


def test_every_rival_of_a_line_can_be_made() -> None:
    names = [name for line in local_steps.LINES for name in line.least]
    assert set(names) == set(LOCAL)
    assert all(set(line.least) == set(line.aims) for line in local_steps.LINES)
    assert all(line.least[name] < line.aims[name] for line in local_steps.LINES for name in line.least)


class Counted(Rival):
    """Counts steps in place of taking them."""

    def __init__(self, interval: int, log: list[str]) -> None:
        self.algorithm: Any = None if not interval else self
        self.interval, self.log, self.steps = interval, log, 0
        self.bytes_sent, self.exchange_seconds, self.wait_seconds = 1000, 2.0, 1.0

    def step(self) -> None:
        self.steps += 1

    def conclude(self) -> None:
        self.log.append(f"concluded after {self.steps}")

    def stats(self) -> Any:
        return self


def test_blocks_are_whole_rounds() -> None:
    """One round is not counted; as many are as come nearest to the steps that are asked for."""

    def rank(communicator: Communicator) -> tuple[Any, Any, list[str], list[str]]:
        alone, every_16 = list[str](), list[str]()
        rivals = {"alone": Counted(0, alone), "every 16": Counted(16, every_16)}
        taken, costs = local_steps.blocks(communicator, rivals, 2, 60, random.Random(0))
        return taken, costs, alone, every_16

    for taken, costs, alone, every_16 in run_ranks(2, rank):
        assert [len(each) for each in taken.values()] == [2, 2]
        assert alone == ["concluded after 63", "concluded after 126"]
        assert every_16 == ["concluded after 80", "concluded after 160"]
        assert costs == {"alone": {}, "every 16": {"bytes": 100.0, "exchange": 0.2, "wait": 0.1}}


def test_shares_are_those_of_blocks() -> None:
    cost = {"bytes": 1e6, "exchange": 0.32, "wait": 0.1}
    rows = []
    for line in local_steps.LINES:
        times = {"alone": [0.2, 0.1, 0.4], **{name: [0.4, 0.1, 0.5] for name in line.least}}
        rows.append({"rate_mbit": line.rate, "times": times, "costs": dict.fromkeys(line.least, cost)})
    found = local_steps.described({"rows": rows, "load_average": 0.5}, "tr")
    bars = {bar["ours"]: bar for row in found for bar in row["bars"]}
    assert bars["sparse_loco"]["of_blocks"] == pytest.approx([0.5, 1.0, 0.8])
    assert bars["sparse_loco"]["share"] == pytest.approx(0.8)
    # A sixteenth of an exchange is added to each step without communication.
    assert bars["local_sgd"]["of_blocks"] == pytest.approx([0.22 / 0.4, 0.12 / 0.1, 0.42 / 0.5])
    text = io.StringIO()
    local_steps.show(Console(file=text, width=150), found)
    assert "sparse_loco delayed" in text.getvalue()


def test_ranks_of_different_speed_run() -> None:
    rows = unequal.measured(0.001, 1)
    assert [row["bar"] for row in rows] == [1.35, 0.88]
    assert all(row["alone"] > 0 and row["equal"] > 0 and row["by_speed"] > 0 for row in rows)
