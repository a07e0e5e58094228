"""A recorded run is recomputed bit for bit by the simulator, and followed by another run."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import Wagma, simulate
from bagua_kernels.algorithms.asynchronous.order import Event, file_of, load
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.mailbox.groups import Butterfly, Shuffled, Whole
from tests.algorithms.asynchronous.common import flat
from tests.algorithms.ranks import Odd, batch
from tests.grids import grid, only

RATE = 0.05


def make(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    module = Odd()
    return module, torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.5)


def loss(module: torch.nn.Module, rank: int, number: int) -> torch.Tensor:
    return module(batch(rank, number)).square().mean()


def run(communicator: Communicator, options: dict[str, Any], unequal: bool, seed: int) -> torch.Tensor:
    draws = random.Random(f"{seed} {communicator.rank}")
    module, optimizer = make(communicator.rank)
    with Wagma(module, optimizer, communicator=communicator, **options) as model:
        for step in range(12 + (3 * communicator.rank if unequal else 0)):
            time.sleep(draws.choice([0.0, 0.0, 0.004]))
            loss(model, communicator.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    return flat(module)


CASES = {
    "butterfly": (4, {"groups": Butterfly(4, 2), "period": 5}, False),
    "shuffled": (5, {"groups": Shuffled(5, 2), "period": None}, False),
    "unequal": (3, {"groups": Shuffled(3, 2), "period": 4}, True),
    "paper": (4, {"groups": Whole(4), "stale_rule": "paper", "activate": "all", "period": 6}, False),
}


@pytest.mark.parametrize("case", only(CASES, "shuffled", "paper"))
def test_recorded_and_replayed(case: str, tmp_path: Path) -> None:
    size, options, unequal = CASES[case]
    first = run_ranks(size, run, {**options, "record": tmp_path / "a"}, unequal, 1)
    records = [load(file_of(tmp_path / "a", rank)) for rank in range(size)]
    modules = simulate.replay(records, make, loss, stale_rule=options.get("stale_rule", "conservative"))
    for module, expected in zip(modules, first, strict=True):
        assert torch.equal(flat(module), expected)
    # Other pauses, the same order.
    again = run_ranks(size, run, {**options, "replay": tmp_path / "a", "record": tmp_path / "b"}, unequal, 2)
    assert all(map(torch.equal, again, first))
    assert [load(file_of(tmp_path / "b", rank)) for rank in range(size)] == records


def test_records_that_do_not_belong_together() -> None:
    groups = Whole(2)
    events = simulate.record(groups, None, [[1.0] * 3, [2.0] * 3])
    lacking = [events[0], [event for event in events[1] if event.kind not in ("read", "receive")]]
    with pytest.raises(ValueError, match="do not belong together"):
        simulate.replay(lacking, make, loss)


def test_a_line_that_is_no_event(tmp_path: Path) -> None:
    file = tmp_path / "rank0.jsonl"
    file.write_text('["read", null]\nnonsense\n')
    with pytest.raises(ValueError, match=r"line 2 of .*rank0.jsonl is no event"):
        load(file)
    file.write_text('["read", null]\n')
    assert load(file) == [Event("read")]


def test_synthetic_records_have_the_staleness_of_their_times() -> None:
    """Two ranks, one of which takes twice as long: the other one starts each version."""
    events = simulate.record(Whole(2), 4, [[1.0] * 8, [2.0] * 8])
    lines = [[event.execution for event in each if event.execution is not None] for each in events]
    assert [line.version for line in lines[0]] == list(range(8))
    assert all(line.fresh for line in lines[0])
    assert [line.staleness for line in lines[1]] == [1, 1, 2, 0, 1, 1, 2, 0]


@grid(cover=1, activate=["group", "all"], size=[3, 6, 8])
def test_synthetic_records_can_be_replayed(activate: Any, size: int) -> None:
    draws = random.Random(size)
    seconds = [[draws.choice([1.0, 1.5]) for _ in range(12)] for _ in range(size)]
    records = simulate.record(Shuffled(size, 2), 5, seconds, activate=activate)
    for events in records:
        versions = [event.execution.version for event in events if event.execution is not None]
        assert versions == list(range(12))
        assert sum(event.kind == "step" for event in events) == 12
    modules = simulate.replay(records, make, partial(loss))
    assert all(flat(module).isfinite().all() for module in modules)


def test_groups_that_wait_have_no_stale_contribution() -> None:
    seconds = [[1.0 + 0.5 * ((rank + step) % 3 == 0) for step in range(12)] for rank in range(5)]
    records = simulate.record(Shuffled(5, 2), 4, seconds, synchronous=True)
    lines = [event.execution for events in records for event in events if event.execution is not None]
    assert len(lines) == 60
    assert all(line.fresh for line in lines)


def test_who_comes_at_the_same_time_is_not_late() -> None:
    lines = [event.execution for events in simulate.record(Whole(3), None, [[1.0] * 4] * 3) for event in events]
    assert all(line.fresh for line in lines if line is not None)
