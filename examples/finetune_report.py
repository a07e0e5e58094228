"""What is around `finetune_lora.py`: it starts ranks on emulated hosts, and ends with a table, a picture and numbers."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import report
import torch
from rich.console import Console
from rich.table import Table

PROGRAM = Path(__file__).with_name("finetune_lora.py")
BASE = Path(__file__).with_name("finetune_base.py")
LABELS = {
    "alone": "one machine alone",
    "ddp": "DDP",
    "bytegrad": "ByteGrad, 8 bits",
    "diloco": "DiLoCo, 8 bits",
}
LONGEST = 1800  # seconds after which ranks are ended


def bytes_sent() -> int:
    """Returns the bytes, with headers, that this host has put on its line so far; on its loopback where it has no line."""
    found = {}
    for row in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = row.partition(":")
        found[name.strip()] = int(numbers.split()[8])
    lines = [count for name, count in found.items() if name != "lo"]
    return sum(lines) if any(lines) else found.get("lo", 0)


def run(options: argparse.Namespace) -> None:
    """Starts the ranks of each part in turn, and reports."""
    found, answer = report.look_for_hosts(min(options.rates, default=100.0))
    reason = "" if found else answer
    if reason:
        print(
            f"{reason}\ntraining with two processes on one machine: throughput behind slow lines is left out",
            flush=True,
        )
    console, before = Console(), os.getloadavg()[0]
    rates = [] if reason else options.rates
    options.output.mkdir(parents=True, exist_ok=True)
    base = options.base
    if base is None and options.base_steps:
        base = options.output / "finetune_base.pt"
        command = [BASE, "--size", options.size, "--steps", f"{options.base_steps}", "--output", base]
        subprocess.run([sys.executable, *map(str, command)], cwd=report.ROOT, check=True)
    given = [] if base is None else ["--base", str(base)]
    parts = [(f"{rate:g}", rate, "steps") for rate in rates] + [("losses", None, "losses")]
    for name, rate, part in parts:
        print(f"{'losses' if rate is None else f'steps at {rate:g} Mbit/s'} …", flush=True)
        program = [str(PROGRAM), *sys.argv[1:], *given, "--output", str(options.output), "--part", part, "--name", name]
        if reason:
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--", *program]
        else:
            limit = [] if rate is None else ["--rate", f"{rate:g}"]
            lab = ["-m", report.LAB, "run", "--hosts", "2", *limit, "--timeout", f"{LONGEST}", "--"]
            command = [*lab, sys.executable, *program]
        subprocess.run([sys.executable, *command], cwd=report.ROOT, env=_environment(), check=True)
    # Ranks run in the root of the repository.
    files = {name: options.output / f"finetune_{name}.json" for name, _, _ in parts}
    contents = {name: json.loads(file.read_text()) for name, file in files.items()}
    for file in [*files.values(), *([] if base == options.base else [base])]:
        file.unlink()
    losses = contents.pop("losses")
    numbers = {
        "size": options.size,
        "steps": options.steps,
        "base_steps": options.base_steps,
        "reason": reason,
        "rates": {name: _summary(part["ranks"]) for name, part in contents.items()},
        "losses": {
            way: {
                "validation": [one["validation_loss"] for one in runs],
                "training": [_rounded(one["loss"]) for one in runs],
            }
            for way, runs in losses.items()
        },
        "torch": torch.__version__,
        # More than one process per core means that other work has taken a part of the time.
        "load": {"cores": os.cpu_count(), "before": before, "after": os.getloadavg()[0]},
    }
    (options.output / "finetune_lora.json").write_text(json.dumps(numbers, indent=1) + "\n")
    console.print(table(numbers))
    picture(numbers, options.output / "finetune_lora.png")
    console.print(f"picture: {options.output / 'finetune_lora.png'}   numbers: {options.output / 'finetune_lora.json'}")


def _environment() -> dict[str, str]:
    # No requests to the hub: nothing is downloaded.
    return {**os.environ, "PYTHONPATH": report.path_with_root(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]


def _summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the numbers of each way at a rate: means over ranks, and medians over turns.

    In a turn all ways are measured within seconds, so that other work on the machine slows all of them. Fastest turns of two ways
    may lie minutes apart; their ratio is given beside the median.
    """
    turns = [
        {
            way: {
                key: statistics.fmean(rank["turns"][turn][way][key] for rank in ranks) for key in ("seconds", "bytes")
            }
            for way in ranks[0]["turns"][0]
        }
        for turn in range(len(ranks[0]["turns"]))
    ]
    summary: dict[str, Any] = {key: ranks[0][key] for key in ("trained_bytes", "base_bytes")}
    summary["ways"] = {}
    for way in turns[0]:
        fastest = {each: min(turn[each]["seconds"] for turn in turns) for each in ("alone", way)}
        ratios = [turn["alone"]["seconds"] / turn[way]["seconds"] for turn in turns]
        start = max(rank["start_bytes"][way] for rank in ranks)
        summary["ways"][way] = {
            "seconds_per_step": statistics.median(turn[way]["seconds"] for turn in turns),
            "seconds_of_turns": _rounded([turn[way]["seconds"] for turn in turns]),
            "throughput": statistics.median(ratios),
            "throughput_of_fastest": fastest["alone"] / fastest[way],
            "bytes_per_step": statistics.median(turn[way]["bytes"] for turn in turns),
            "start_bytes": start,
            "start_seconds": max(rank["start_seconds"][way] for rank in ranks),
            # What starts by fewer bytes than the adapters have sends no base, which is many times as large.
            "base_bytes_sent": min(start, ranks[0]["base_bytes"]) if start > 2 * ranks[0]["trained_bytes"] else 0,
        }
    return summary


def table(numbers: dict[str, Any]) -> Table:
    """Returns the table that the command prints."""
    lines = [f"{numbers['reason']}: throughput is not measured"] if numbers["reason"] else []
    for way, one in numbers["losses"].items():
        values = ", ".join(f"{value:.3f}" for value in one["validation"])
        lines.append(f"{LABELS[way]}: loss on held back text after {numbers['steps']} steps, for each seed: {values}")
    title = f"LoRA on GPT-2 ({numbers['size']}), two machines with one core each"
    found = Table(title=title, caption="\n".join(lines), caption_justify="left")
    found.add_column("way", overflow="fold")
    for heading in (
        "line,\nMbit/s",
        "throughput\nper rank",
        "sent per\nstep, kB",
        "of the base\nsent, MB",
        "start,\ns",
    ):
        found.add_column(heading, justify="right")
    for rate, summary in numbers["rates"].items():
        for way, one in summary["ways"].items():
            if way == "alone" and rate != next(iter(numbers["rates"])):
                continue
            alone = way == "alone"
            found.add_row(
                LABELS[way],
                "–" if alone else rate,
                f"{one['throughput']:.2f}",
                "–" if alone else f"{one['bytes_per_step'] / 1e3:,.1f}",
                "–" if alone else f"{one['base_bytes_sent'] / 1e6:,.1f}",
                "–" if alone else f"{one['start_seconds']:.1f}",
            )
    return found


def picture(numbers: dict[str, Any], path: Path) -> None:
    """Draws throughput at each rate, and the losses of all seeds."""
    ways = [way for way in LABELS if way != "alone"]
    colours = {**dict(zip(ways, report.COLOURS, strict=False)), "alone": report.GREY}
    with plt.rc_context(report.STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
        for place, summary in enumerate(numbers["rates"].values()):
            for at, way in enumerate(ways):
                value = summary["ways"][way]["throughput"]
                left.bar(place + 0.27 * (at - 1), value, 0.25, color=colours[way], label=None if place else LABELS[way])
                left.text(place + 0.27 * (at - 1), value + 0.01, f"{value:.2f}", ha="center", fontsize=9)
        left.axhline(1.0, color=report.GREY, linewidth=1)
        left.set_xticks(range(len(numbers["rates"])), [f"{rate} Mbit/s" for rate in numbers["rates"]])
        left.set(ylabel="throughput per rank, alone = 1", ylim=(0, 1.15))
        left.grid(False, axis="x")
        left.set_axisbelow(True)
        for way, one in numbers["losses"].items():
            for number, losses in enumerate(one["training"]):
                label = None if number or numbers["rates"] else LABELS[way]
                right.plot(report.smooth(losses), color=colours[way], linewidth=1.2, alpha=0.8, label=label)
            right.plot(
                [len(losses)] * len(one["validation"]), one["validation"], "o", color=colours[way], markersize=4.5
            )
        right.set(xlabel="steps", ylabel="loss, nats per character")
        right.set_title("points: held back text; lines: mean of 20 steps", fontsize=9, color=report.GREY, loc="right")
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle("LoRA on two machines behind slow lines", x=0.01, ha="left", color=report.INK, fontsize=13)
        figure.savefig(path, dpi=150)
        plt.close(figure)
