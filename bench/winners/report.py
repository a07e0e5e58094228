"""What was predicted beside what was measured, cell by cell."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bagua_kernels.algorithms.choosing.cost.facts import Machine, Network
from bagua_kernels.algorithms.choosing.cost.methods import known
from bagua_kernels.algorithms.choosing.cost.predict import predict
from bench.training import predictions

Rows = list[dict[str, Any]]
ADAM = ("ddp", "allreduce", "bytegrad", "int4")
# What a user may take: with Adam what it forgives, with SGD everything that sends gradients, or local steps with any optimizer.
# Of those that are predicted to be as fast the first is taken. Gradients come by what loses least. Local steps come by their
# bytes: to send them takes processor time from training, which a prediction leaves out.
CHOICES = {
    "SGD": (*ADAM, "powersgd 4", "sign", "topk"),
    "Adam": ADAM,
    "local steps": ("sparse_loco delayed", "diloco int4", "local_sgd"),
}
NEAR = 1.05  # times the fastest: as good
AS_FAST = 1.03  # likewise, as predicted
WORTH = 1.10  # exact means may be predicted to take so many times as long, and are taken nevertheless
EXACT = ("ddp", "allreduce")
PREDICTED_ONLY = 10_000.0  # Mbit/s


def predicted(machine: Machine, base: float, model: str, network: Network) -> dict[str, float]:
    """Seconds of a step of each method on a network, by the name of its rival.

    Args:
        machine: its facts.
        base: seconds of a step without communication.
        model: a name of `bench.training.models`.
        network: of all ranks.
    """
    by_name, job = known(), predictions.job(model, base)
    return {
        name: predict(by_name[predictions.NAMES[name]], predictions.bucketed(job, name), machine, network).seconds
        for name in itertools.chain(CHOICES["SGD"], CHOICES["local steps"])
    }


def cells(rows: Rows) -> Rows:
    """A cell for each network, model and choice; those of networks that were fitted to are left out."""
    # What a codec costs in each step is not seen in steps of which one in many sends.
    steps = [
        {**row, "seconds": {n: s for n, s in row["seconds"].items() if n not in CHOICES["local steps"]}} for row in rows
    ]
    told = {"steps": steps, "delays": [], "local": [], "asynchronous": []}
    machine, base = predictions.fit(told), predictions.alone(told)
    fastest = max(row["rate_mbit"] or 0.0 for row in rows)
    found = []
    for row in rows:
        rate, delay, model = row["rate_mbit"], row["delay_ms"], row["model"]
        if rate in (None, predictions.FITTED):
            continue
        network = Network(row["hosts"], rate * 1e6, delay / 1e3)
        found += compared(row, predicted(machine, base[model], model, network), row["seconds"])
        if rate == fastest:
            faster = Network(row["hosts"], PREDICTED_ONLY * 1e6, delay / 1e3)
            there = {**row, "rate_mbit": PREDICTED_ONLY}
            found += compared(there, predicted(machine, base[model], model, faster), None)
    return found


def compared(row: dict[str, Any], expected: dict[str, float], measured: dict[str, float] | None) -> Rows:
    """A cell for each choice, of one model on one network."""
    found = []
    for choice, names in CHOICES.items():
        least = min(expected[name] for name in names)
        winner = next(name for name in names if expected[name] <= (WORTH if name in EXACT else AS_FAST) * least)
        place = {name: row[name] for name in ("model", "rate_mbit", "delay_ms")}
        cell = {**place, "choice": choice, "predicted": winner, "predicted_seconds": {n: expected[n] for n in names}}
        if measured is not None:
            fastest = min(names, key=lambda name: measured[name])
            over = measured[winner] / measured[fastest]
            cell |= {"measured": fastest, "over_fastest": over, "right": winner == fastest or over <= NEAR}
        found.append(cell)
    return found


def summary(found: Rows) -> dict[str, Any]:
    """How many cells are right, of those that were measured."""
    measured = [cell for cell in found if "right" in cell]
    right = {choice: [cell["right"] for cell in measured if cell["choice"] == choice] for choice in CHOICES}
    total: Sequence[bool] = [each for one in right.values() for each in one]
    shares = {choice: sum(each) / len(each) for choice, each in right.items() if each}
    return {"cells": len(total), "right": sum(total), "share": sum(total) / max(1, len(total)), "by_choice": shares}


def show(console: Console, found: Rows) -> None:
    """Prints a row for each cell."""
    table = Table(title=f"predicted and measured winners: {summary(found)}", title_justify="left")
    for heading in ("Mbit/s", "ms", "model", "choice", "predicted", "measured", "predicted over fastest", "right"):
        table.add_column(heading, justify="right" if heading in ("Mbit/s", "ms") else "left")
    for cell in sorted(found, key=lambda one: (one["rate_mbit"], one["delay_ms"], one["model"])):
        place = f"{cell['rate_mbit']:g}", f"{cell['delay_ms']:g}", cell["model"], cell["choice"], cell["predicted"]
        if "right" in cell:
            table.add_row(*place, cell["measured"], f"{cell['over_fastest']:.2f}", "" if cell["right"] else "wrong")
        else:
            table.add_row(*place, "", "", "")
    console.print(table)
