"""`bench.training`: which groups are measured, which rows are kept, and steps with neighbours on links with a delay."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from bench.netlab.lab import available
from bench.training import groups, measure, report, surcharge
from bench.training.models import MODELS, batch, model
from bench.training.rivals import HOOK, NEIGHBOURS, OURS


def test_every_rival_of_a_group_can_be_made() -> None:
    for names in (*groups.GRADIENTS, *groups.TRIED, *groups.DECENTRALIZED, groups.DELAYED):
        assert "ddp" in names
        assert all(name == "alone" or name.startswith(("ddp", HOOK)) or name in OURS for name in names)
    # Each algorithm of neighbours in one group, beside all-reduce.
    assert sorted(name for names in groups.DECENTRALIZED for name in groups.own(names)) == sorted(NEIGHBOURS)
    assert all("allreduce" in names for names in groups.DECENTRALIZED)


def test_methods_choose_groups() -> None:
    everything = groups.wanted(None)
    assert [names for names, _ in everything] == [*groups.GRADIENTS, *groups.TRIED, *groups.DECENTRALIZED]
    assert [names for names, unlimited in everything if unlimited] == groups.TRIED
    assert [names for names, _ in groups.wanted(["decentralized"])] == groups.DECENTRALIZED
    assert [names for names, _ in groups.wanted(["lowprec 2", "topk"])] == [
        groups.GRADIENTS[1],
        groups.DECENTRALIZED[1],
    ]
    assert groups.wanted(["gradients", "decentralized"]) == everything
    with pytest.raises(ValueError, match="got majority"):
        groups.wanted(["majority"])


def test_bars_belong_to_rates() -> None:
    names = [name for group in groups.DECENTRALIZED for name in group]

    def found(rate: float | None, delay: float | None = None) -> set[tuple[str, str, float]]:
        return {bar for bar in groups.bars(rate, names, delay) if bar[0] in NEIGHBOURS}

    assert found(100.0) == {("lowprec 8", "ddp", 0.44), ("lowprec 2", "ddp", 0.18)}
    assert found(500.0) == {("decentralized", "ddp", 0.75)}
    assert found(1000.0) == set()
    assert found(None) == {(name, "allreduce", 1.02) for name in NEIGHBOURS}
    assert found(500.0, 20.0) == {("decentralized", "ddp", 0.6), ("decentralized", "allreduce", 0.95)}


def test_rows_have_what_ranks_returned() -> None:
    names = groups.DECENTRALIZED[0]
    times = {name: [2.0, 1.0, 3.0] for name in names} | {"decentralized": [0.5, 1.5, 1.0]}
    costs = {name: {"bytes": 1e6, "cpu": 0.1, "exchange": 0.2, "wait": 0.05} for name in names}
    rows = [{"rate_mbit": 500.0, "times": times, "costs": costs, "trials": dict.fromkeys(names, "")}]
    told = {"rows": rows, "tunings": {"500.0": '{"sockets": 1, "measured": []}'}, "load_average": 0.5}
    (found,) = measure.described(told, "tr", None)
    assert (found["counted"], found["load_average"], found["tuning"]) == (3, 0.5, {"sockets": 1})
    assert found["seconds"]["decentralized"] == 1.0
    assert [(bar["ours"], bar["rival"], bar["ratio"]) for bar in found["bars"]] == [
        ("allreduce", "ddp", 1.0),
        ("decentralized", "ddp", 0.5),
    ]
    (delayed,) = measure.described(told, "small", 20.0)
    assert delayed["delay_ms"] == 20.0
    text = io.StringIO()
    console = Console(file=text, width=150)
    report.show_steps(console, [found])
    report.show_delays(console, [delayed])
    assert "decentralized │ 1.000 (0.50; 1.00; 0.10)" in " ".join(text.getvalue().split())
    assert "wait ms" in text.getvalue()


def row(model: str, rate: float | None, names: list[str], mark: int, **more: Any) -> dict[str, Any]:
    return {"model": model, "rate_mbit": rate, "seconds": dict.fromkeys(names, 1.0), "mark": mark, **more}


def test_rows_of_other_models_rates_and_groups_are_kept() -> None:
    first, second = groups.GRADIENTS[:2]
    neighbours = groups.DECENTRALIZED[0]
    old = [
        row("fc", 500.0, first, 0),
        # A rival that is not there any more does not keep its group's row.
        row("fc", 500.0, [*neighbours, "removed"], 1),
        row("fc", None, neighbours, 2),
        row("tr", 500.0, neighbours, 3),
        row("fc", 500.0, second, 4),
        row("fc", 500.0, groups.DELAYED, 5, delay_ms=20.0),
    ]
    merged = measure.merged(old, [row("fc", 500.0, neighbours, 10), row("fc", 500.0, second, 11)])
    assert [each["mark"] for each in merged] == [0, 2, 3, 5, 10, 11]


@pytest.mark.parametrize("name", ["resnet", "bert", "small"])
def test_losses_of_batches_have_gradients(name: str) -> None:
    for rank in range(3):
        x, y = batch(name, rank)
        torch.nn.functional.cross_entropy(model(name)(x), y).backward()


def test_models_take_their_batches() -> None:
    x, y = batch("small", 1)
    small = model("small")
    assert small(x).shape == (len(y), 100)
    assert sum(p.numel() for p in small.parameters()) * 4 == measure._GRADIENT_BYTES["small"]
    assert set(measure._GRADIENT_BYTES) < set(MODELS)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_steps_on_links_with_a_delay() -> None:
    """Two hosts, one counted step of each rival."""
    if reason := available():
        pytest.skip(reason)
    names = ["ddp", "allreduce", *NEIGHBOURS]
    settings = {"model": "small", "groups": [(names, [(500.0, 1, 1)])], "tunings": {}, "budget": 1.0}
    told = measure.run(2, "steps", settings, delay=1.0)
    (row,) = told["rows"]
    assert {name: len(each) for name, each in row["times"].items()} == dict.fromkeys(names, 1)
    (found,) = measure.described(told, "small", 1.0)
    assert found["seconds"] == {name: each for name, (each,) in row["times"].items()}
    size = measure._GRADIENT_BYTES["small"]
    costs = {name: cost["bytes"] / size for name, cost in found["costs"].items()}
    # What a rank's last messages leave after the count may be lacking.
    assert 0.6 < costs["decentralized"] < 1.3
    # A quarter and the scales.
    assert 0.12 < costs["lowprec 8"] < 0.4
    assert all(found["costs"][name]["exchange"] > 0 for name in NEIGHBOURS)
    text = io.StringIO()
    report.show_delays(Console(file=text, width=150), [found])
    assert all(name in text.getvalue() for name in names)


def test_a_comparison_in_a_hundred_steps_takes_a_hundredth_of_one_in_each() -> None:
    row = {"name": ("bytegrad", None), "ratio": 1.04, "seconds": [1.0, 2.0]}
    found = surcharge.described(row)
    assert (found["name"], found["rate_mbit"]) == ("bytegrad", None)
    assert found["hundredth"] == pytest.approx(0.0004)
    assert {*surcharge._VERIFIED} <= {name for group in surcharge._GROUPS for name in group}
