"""What `bench.convergence` makes of its runs: means, verdicts, a table, and rows that JSON can hold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from bench.convergence.row import Row
from bench.convergence.rows import ROWS
from bench.convergence.tasks import Task

NEAR, WORSE, POINTS = 1.08, 1.2, 0.005


def summary(row: Row, steps: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The means of a row's runs, and what it takes to repeat them."""
    optimizer = row.optimizer.__name__ if callable(row.optimizer) else row.optimizer
    options = {"momentum": row.momentum, "rate": row.rate, "optimizer": optimizer, "by_label": row.by_label or None}
    return {
        "label": row.label,
        "algorithm": row.kind.name,
        "options": row.arguments(steps),
        **{key: value for key, value in options.items() if value is not None},
        "baseline": row.baseline,
        "steps": steps,
        "loss": statistics.fmean(one["loss"] for one in runs),
        "accuracy": statistics.fmean(one["accuracy"] for one in runs),
        "bytes_per_step": runs[0]["bytes_per_step"],
        "runs": runs,
    }


def judge(task: Task, rows: list[dict[str, Any]]) -> None:
    """Adds to each row how it compares with its baseline, and whether its bar is met; None where there is no bar."""
    found = {one["label"]: one for one in rows}
    bars = {row.label: row for row in ROWS}
    for one in rows:
        base, row = found[one["baseline"]], bars[one["label"]]
        one["loss_ratio"] = one["loss"] / base["loss"]
        one["loss_ratios"] = [r["loss"] / b["loss"] for r, b in zip(one["runs"], base["runs"], strict=True)]
        if row.most is not None or row.least is not None:
            # Pairs have the start and the order of examples in common.
            one["loss_ratio"] = statistics.fmean(one["loss_ratios"])
        one["loss_difference"] = one["loss"] - base["loss"]
        one["accuracy_difference"] = one["accuracy"] - base["accuracy"]
        one["bar"], one["met"] = "", None
        if one is not base:
            one["bar"], one["met"] = verdict(task, row, one)


def verdict(task: Task, row: Row, one: dict[str, Any]) -> tuple[str, bool | None]:
    """The bar of a row, and whether its runs meet it."""
    ratio = one["loss_ratio"]
    if row.raises is not None:
        name = row.raises.__name__
        # A run that trained to the end has no error.
        return name, all(run.get("error", "").startswith(name) and run["finite"] for run in one["runs"])
    if row.most is not None:
        return f"loss ≤ {row.most} x", ratio <= row.most
    if row.least is not None:
        return f"loss ≥ {row.least} x", not ratio < row.least
    if task.name == "digits" and row.bar == "near":
        return f"loss ≤ {NEAR} x", ratio <= NEAR
    if task.name == "digits" and row.bar == "worse":
        # What has diverged to NaN is worse, too.
        return f"loss ≥ {WORSE} x", not ratio < WORSE
    if task.name == "fashion" and row.bar != "none" and (row.bar or not row.options):
        return f"accuracy ≥ -{POINTS:.1%}", one["accuracy_difference"] >= -POINTS
    return "", None


def table(task: Task, rows: Sequence[dict[str, Any]]) -> Table:
    seeds = len(rows[0]["runs"])
    grid = Table(
        title=f"{task.name}: {task.ranks} ranks, {rows[0]['steps']} steps, means of {seeds} seeds", title_justify="left"
    )
    grid.add_column("")
    loss = "validation loss" if task.validates else "training loss"
    for heading in (loss, "of baseline's", "by seed", "test accuracy", "difference", "bytes a step", "s"):
        grid.add_column(heading, justify="right")
    grid.add_column("bar")
    for one in rows:
        told = "" if one["met"] is None else "met" if one["met"] else "[bold]MISSED[/bold]"
        grid.add_row(
            one["label"],
            cell(one["loss"], ".4f"),
            cell(one["loss_ratio"], ".3f"),
            " ".join(cell(ratio, ".3f") for ratio in one["loss_ratios"]),
            cell(one["accuracy"], ".2%"),
            cell(one["accuracy_difference"] * 100, "+.2f"),
            cell(one["bytes_per_step"], ",.0f"),
            f"{statistics.fmean(r['seconds'] for r in one['runs']):.0f}",
            f"{one['bar']} {told}",
        )
    return grid


def cell(value: float, form: str) -> str:
    """The value as text, a dash if it is NaN."""
    return "–" if math.isnan(value) else format(value, form)


def finite(value: Any) -> Any:
    """The value with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def unread(row: dict[str, Any]) -> dict[str, Any]:
    """A row that was written before, with NaN for what was not finite."""

    def numbers(of: dict[str, Any]) -> dict[str, float]:
        return {name: math.nan for name in ("loss", "accuracy", "bytes_per_step") if name in of and of[name] is None}

    return {**row, **numbers(row), "runs": [{**one, **numbers(one)} for one in row["runs"]]}
