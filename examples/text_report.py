"""What ends `train_text.py`: a table, a picture of loss against time and bytes, and a file of numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import report
from rich.console import Console
from rich.table import Table


def write(runs: Sequence[report.Run], folder: Path, title: str, options: Mapping[str, object]) -> None:
    """Prints a table of the runs, and writes their numbers and their picture to a folder."""
    table = Table(title=title, caption=_caption(runs), caption_justify="left")
    table.add_column("algorithm", overflow="fold")
    # All of it fits into 80 columns.
    headings = ("validation\nloss", "sent per\nstep, kB", "ratio", "ms per\nstep", "of it\nwaiting", "time\nin all")
    for heading in headings:
        table.add_column(heading, justify="right")
    for run in runs:
        about = "" if run.measured is None else "≈ "
        table.add_row(
            run.algorithm,
            f"{run.evaluations[-1][1]:.3f}",
            f"{run.bytes_per_step / 1e3:,.1f}",
            f"{run.compression_ratio:,.1f} ×" if run.compression_ratio else "–",
            f"{about}{_mean_seconds(run) * 1e3:,.0f}",
            f"{about}{run.waited[-1] / run.seconds[-1]:.0%}",
            f"{about}{run.seconds[-1]:,.0f} s",
        )
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {
        "options": dict(options),
        "title": title,
        "ranks": runs[0].ranks,
        "parameters": runs[0].parameters,
        "runs": [_numbers(run) for run in runs],
    }
    (folder / "train_text.json").write_text(json.dumps(numbers, indent=1, default=str) + "\n")
    picture(runs, folder / "train_text.png", title)
    console = Console()
    console.print(table)
    console.print(f"picture: {folder / 'train_text.png'}   numbers: {folder / 'train_text.json'}")


def _caption(runs: Sequence[report.Run]) -> str | None:
    counts = sorted({run.measured for run in runs if run.measured is not None})
    return f"≈ extrapolated from {counts[0]} measured steps" if counts else None


def _mean_seconds(run: report.Run) -> float:
    # Not the median: most steps of algorithms with local steps send nothing.
    return run.seconds[-1] / len(run.seconds)


def _numbers(run: report.Run) -> dict[str, Any]:
    return {
        "algorithm": run.algorithm,
        "validation_loss": run.evaluations[-1][1],
        "bytes_per_step": run.bytes_per_step,
        "compression_ratio": run.compression_ratio,
        "seconds_per_step": _mean_seconds(run),
        "measured_steps": run.measured,
        "steps": len(run.loss),
        "validation": [{"step": step, "loss": loss} for step, loss in run.evaluations],
        "loss": [round(value, 6) for value in run.loss],
        "seconds": [round(value, 6) for value in run.seconds],
        "waited": [round(value, 6) for value in run.waited],
        "bytes_sent": run.bytes_sent,
    }


def picture(runs: Sequence[report.Run], path: Path, title: str) -> None:
    """Draws training loss (lines) and validation loss (points) against time and against bytes sent.

    Runs whose times are extrapolated have a broken line, and that word in the legend.
    """
    with plt.rc_context(report.STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
        for run, colour in zip(runs, report.COLOURS * len(runs), strict=False):
            measured = run.measured is None
            label = run.algorithm if measured else f"{run.algorithm} (extrapolated from {run.measured} steps)"
            for panel, axis in zip(panels, (run.seconds, [count / 1e6 for count in run.bytes_sent]), strict=True):
                panel.plot(
                    axis, report.smooth(run.loss), "-" if measured else "--", color=colour, label=label, linewidth=1.6
                )
                steps, losses = zip(*run.evaluations, strict=True)
                panel.plot([axis[step - 1] for step in steps], losses, "o", color=colour, markersize=4.5)
        panels[0].set(xscale="log", xlabel="training time, s", ylabel="loss, nats per character")
        # Before its first round an algorithm with local steps has sent nothing.
        panels[1].set(xscale="symlog", xlim=(0, None), xlabel="sent by a rank, MB")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        panels[1].set_title(
            "points: validation; lines: mean of 20 training steps", fontsize=9, color=report.GREY, loc="right"
        )
        figure.suptitle(title, x=0.01, ha="left", color=report.INK, fontsize=13, fontweight="bold")
        figure.savefig(path, dpi=150)
        plt.close(figure)
