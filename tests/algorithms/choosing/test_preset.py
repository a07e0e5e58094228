"""Which algorithm is chosen for a line, and with which interval."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import DiLoCo, GradientAllReduce, SparseLoCo, preset
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import batch
from tests.grids import grid

MODEL = {"parameters": 10_000_000, "ranks": 4, "step_seconds": 0.2}
# Bytes of an element on each line, from the formulas of the codecs' pages.
BYTES = {"all_reduce": 4 * 1.5, "float32": 4 * 1.5, "int4": 17 / 32 * 1.5, "sparse": 84 / 4096 * 3}


@grid(
    cover=1,
    line__kind__codec=[
        ("1Mbit", SparseLoCo, "chunked_topk:k=64,chunk=4096"),
        ("10Mbit", SparseLoCo, "chunked_topk:k=64,chunk=4096"),
        ("100Mbit", DiLoCo, None),
        ("1Gbit", DiLoCo, None),
        (3e9, GradientAllReduce, None),
    ],
)
def test_choices_for_ten_million_parameters(line: Any, kind: type, codec: str | None) -> None:
    chosen = preset(line, **MODEL).choice
    assert chosen.algorithm is kind
    assert chosen.options.get("codec") == codec


@grid(
    cover=1,
    line=["1Mbit", "10Mbit", "100Mbit", "1Gbit", 2.5e7],
    parameters=[1_000, 10_000_000, 1_000_000_000],
    ranks=[2, 4, 16],
)
def test_intervals_are_the_least_that_fit(line: Any, parameters: int, ranks: int) -> None:
    step = 0.2
    found = preset(line, parameters=parameters, ranks=ranks, step_seconds=step)
    rate = {"1Mbit": 1e6, "10Mbit": 1e7, "100Mbit": 1e8, "1Gbit": 1e9}.get(line, line)
    factors = [4 * 2 * (ranks - 1) / ranks] * 2 + [17 / 32 * 2 * (ranks - 1) / ranks, 84 / 4096 * (ranks - 1)]
    for choice, factor in zip(found.choices, factors, strict=True):
        assert choice.bytes_per_round == pytest.approx(factor * parameters, rel=1e-3)
        assert choice.wire_seconds == pytest.approx(8 * factor * parameters / rate, rel=1e-3)
        assert choice.wire_seconds <= 0.9 * choice.interval * step * (1 + 1e-9)
        assert choice.interval <= 2 or choice.wire_seconds > 0.9 * (choice.interval - 1) * step
        assert choice.fits == (choice.interval <= (1 if choice.algorithm is GradientAllReduce else 30))
        delay, interval = choice.options.get("delay", 0), choice.options.get("interval", 1)
        assert 0 <= delay < interval <= 250
        if choice.interval <= 250 and choice.algorithm is not GradientAllReduce:
            # The line is as long under way as training goes on beside it.
            assert delay == min(interval - 1, math.ceil(choice.wire_seconds / step))
    first = [choice for choice in found.choices if choice.fits]
    assert found.choice is (first[0] if first else min(found.choices, key=lambda c: c.interval))


def test_the_table_marks_the_choice() -> None:
    found = preset("10Mbit", **MODEL)
    marked = [line for line in str(found).splitlines() if "chosen" in line]
    assert len(marked) == 1
    assert "SparseLoCo" in marked[0]
    assert "10 Mbit/s, 10000000 parameters, 4 ranks, 0.2 s a step" in str(found)
    assert found.table().row_count == 4


@pytest.mark.parametrize("line", [1e3, 1e5, 1e9])
def test_it_wraps(line: float) -> None:
    """Each choice is made of options that its class takes, and trains."""

    def rank(communicator: Communicator) -> str:
        module = nn.Sequential(nn.Linear(7, 6), nn.Linear(6, 3))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        parameters = sum(p.numel() for p in module.parameters())
        found = preset(line, parameters=parameters, ranks=2, step_seconds=1e-3)
        model = found.wrap(module, optimizer, communicator=communicator)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(communicator.rank, step)).square().mean().backward()
            optimizer.step()
        model.close()
        return type(model).__name__

    assert run_ranks(2, rank)[0] == {1e3: "SparseLoCo", 1e5: "DiLoCo", 1e9: "GradientAllReduce"}[line]


@pytest.mark.parametrize(
    "wrong", [{"line": "2Mbit"}, {"line": 0.0}, {"parameters": 0}, {"ranks": 1}, {"step_seconds": 0.0}]
)
def test_what_is_refused(wrong: dict[str, Any]) -> None:
    arguments = {"line": "1Mbit", **MODEL, **wrong}
    with pytest.raises(ValueError, match="expected"):
        preset(arguments.pop("line"), **arguments)
