"""The map of winners: what is right, what the page shows of it, and that the page has what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from bench.training import predictions
from bench.winners import measure, page, report

SPEED = {"ddp": 1.0, "allreduce": 0.98, "bytegrad": 0.5, "int4": 0.4, "powersgd 4": 0.3, "sign": 0.2, "topk": 0.25}
SPEED |= {"local_sgd": 0.3, "diloco int4": 0.21, "sparse_loco delayed": 0.2}
PLACE = {"model": "bert", "rate_mbit": 100.0, "delay_ms": 5.0}


@pytest.mark.parametrize(("seconds", "right"), [(0.4, True), (0.379, False), (0.381, True), (0.39, True)])
def test_a_winner_may_take_a_twentieth_longer_than_the_fastest(seconds: float, right: bool) -> None:
    found = report.compared(PLACE, SPEED, {**SPEED, "bytegrad": seconds})
    cells = {cell["choice"]: cell for cell in found}
    assert cells["Adam"]["predicted"] == "int4"
    assert cells["Adam"]["right"] is right
    assert cells["SGD"]["predicted"] == "sign"
    assert cells["local steps"]["measured"] == "sparse_loco delayed"
    told = report.summary(found)
    assert (told["cells"], told["right"]) == (3, 2 + right)


def test_networks_without_measurement_are_neither_right_nor_wrong() -> None:
    found = report.compared(PLACE, SPEED, None)
    assert all("right" not in cell for cell in found)
    assert report.summary(found)["cells"] == 0


def test_the_page_marks_what_is_wrong() -> None:
    found = report.compared(PLACE, SPEED, SPEED)
    found += report.compared({**PLACE, "model": "small"}, {**SPEED, "int4": 2.0}, SPEED)
    found += report.compared({**PLACE, "rate_mbit": 10_000.0}, SPEED, None)
    lines = page.table({"cells": found}).splitlines()
    assert len(lines) == 6
    sign, bytegrad, int4, loco = (page.LABELS[name] for name in ("sign", "bytegrad", "int4", "sparse_loco delayed"))
    assert (
        lines[2]
        == f"| 100 Mbit/s, 5 ms | {sign} | {bytegrad} (small) ✗ small: `CompressedAllReduce`; {int4} (bert) | {loco} |"
    )
    assert lines[3].startswith(f"| 10 Gbit/s, 5 ms | {sign} |")
    assert lines[5] == "Right are 5 of 6 predictions that were measured, 83%."


def test_all_methods_are_measured_and_predicted() -> None:
    measured = {name for part in measure.PARTS.values() for names in part.values() for name in names}
    for names in report.CHOICES.values():
        assert {*names} <= measured
        assert {*names} <= {*predictions.NAMES}
        assert {*names} <= {*page.LABELS}


def test_what_is_measured_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(hosts: int, part: str, settings: dict[str, Any], delay: float | None) -> dict[str, Any]:
        """A step takes as many seconds as its number, and the row says so for each network."""
        assert (hosts, part, settings["model"], delay) == (4, "steps", "small", 5.0)
        rows = [
            {"rate_mbit": rate, "times": {name: [1.0, 2.0, 6.0] for name in names}}
            for names, plans in settings["groups"]
            for rate, _, _ in plans
        ]
        return {"rows": rows, "tunings": {"10.0": "{}"}, "load_average": 0.5}

    monkeypatch.setattr(measure, "run", run)
    results: dict[str, Any] = {"rows": [], "tunings": {}}
    names = [name for name, _ in measure.missing(results)]
    assert len(names) == 18
    for name, measured in list(measure.missing(results)):
        if name.startswith("small, 5 ms"):
            measured()
    assert [name for name, _ in measure.missing(results)] == [n for n in names if not n.startswith("small, 5 ms")]
    assert [row["rate_mbit"] for row in results["rows"]] == list(measure.RATES)
    assert all(row["seconds"]["local_sgd"] == 3.0 and row["seconds"]["ddp"] == 2.0 for row in results["rows"])
