"""Tables of what `bench.training` has measured."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_MANY = 6  # steps from which on an interval is worth a verdict


def show_steps(console: Console, rows: list[dict[str, Any]]) -> None:
    for model in dict.fromkeys(row["model"] for row in rows):
        of = [row for row in rows if row["model"] == model]
        rates = list(dict.fromkeys(row["rate_mbit"] for row in of))
        table = Table(
            title=f"{model}, {of[0]['hosts']} hosts: seconds a step (times DDP's; MB that leave a host; CPU seconds)"
        )
        table.add_column("")
        for rate in rates:
            table.add_column("no limit" if rate is None else f"{rate:g} Mbit/s", justify="right")
        at = {(row["rate_mbit"], name): row for row in reversed(of) for name in row["seconds"]}
        wires = {row["rate_mbit"]: row["limit"] for row in of}
        table.add_row("DDP's bytes alone", *("" if wires[rate] is None else f"{wires[rate]:.2f}" for rate in rates))
        for name in dict.fromkeys(name for row in of for name in row["seconds"]):
            cells = []
            for rate in rates:
                if (rate, name) not in at:
                    cells.append("")
                    continue
                row = at[rate, name]
                seconds, cost = row["seconds"], row["costs"][name]
                ratio = seconds[name] / seconds["ddp"]
                cells.append(f"{seconds[name]:.3f} ({ratio:.2f}; {cost['bytes'] / 1e6:.2f}; {cost['cpu']:.2f})")
            table.add_row(name, *cells)
        console.print(table)
    show_bars(console, rows)


def show_bars(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="bars")
    for column in ("model", "Mbit/s", "ours", "rival", "ratio", "95 %", "at most", ""):
        table.add_column(column, justify="right")
    for row in rows:
        for bar in row["bars"]:
            low, high = bar["interval"]
            # An interval from a few steps means little.
            surely = "" if bar["counted"] < _MANY or low <= bar["bar"] <= high else "surely "
            verdict = "met" if bar["ratio"] <= bar["bar"] else "missed"
            place = (row.get("model", "resnet18"), f"{row.get('rate_mbit') or '-'}")
            numbers = (f"{bar['ratio']:.3f}", f"{low:.3f} to {high:.3f}", f"{bar['bar']:g}", surely + verdict)
            table.add_row(*place, bar["ours"], bar["rival"], *numbers)
    console.print(table)


def show_engine(console: Console, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        for what in ("seconds", "cpu_seconds"):
            console.print(f"ResNet-18, ms a step, {what}:", {n: round(1e3 * each, 2) for n, each in row[what].items()})
    show_bars(console, rows)


def show_overlap(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="ResNet-18, 2 hosts: share of communication that is hidden, or not waited for; ms a step")
    for column in ("", "Mbit/s", "alone", "ddp", "with it", "exchange", "hidden", "not waited for"):
        table.add_column(column, justify="right")
    for row in rows:
        times = [f"{1e3 * row['seconds'][name]:.0f}" for name in ("alone", "ddp", row["name"])]
        shares = [f"{row[share]:.2f}" for share in ("hidden", "beside_backward")]
        table.add_row(row["name"], f"{row['rate_mbit']:g}", *times, f"{1e3 * row['exchange']:.0f}", *shares)
    console.print(table)


def show_delays(console: Console, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        title = f"{row['model']}, {row['hosts']} hosts, {row['rate_mbit']:g} Mbit/s, {row['delay_ms']:g} ms one way"
        table = Table(title=title, title_justify="left")
        for column in ("", "ms a step", "of DDP's", "MB that leave a host", "CPU ms", "exchange ms", "wait ms"):
            table.add_column(column, justify="right" if column else "left")
        for name, seconds in row["seconds"].items():
            cost = row["costs"][name]
            ratio, megabytes = seconds / row["seconds"]["ddp"], cost["bytes"] / 1e6
            spent = [f"{1e3 * cost[what]:.0f}" for what in ("cpu", "exchange", "wait")]
            table.add_row(name, f"{1e3 * seconds:.0f}", f"{ratio:.2f}", f"{megabytes:.2f}", *spent)
        console.print(table)
    show_bars(console, rows)
