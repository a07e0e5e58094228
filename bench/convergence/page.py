"""The tables of models in `docs/models.md`."""

from __future__ import annotations

import math
import statistics
from typing import Any

from bench import markdown
from bench.convergence import paired
from bench.convergence.models import MODELS
from bench.convergence.row import BASELINE

TITLES = {
    "resnet": "ResNet, 0.31 M parameters, on Fashion-MNIST, SGD with momentum",
    "vgg": "VGG, 1.06 M parameters, on Fashion-MNIST, SGD with momentum",
    "bert": "BERT, 0.64 M parameters, masked characters, AdamW",
    "flights": "Recommendation, 0.28 M parameters in tables, late flights, Adagrad",
    "speech": "Speech, 0.21 M parameters, languages of prompts of unequal length, AdamW",
}
WORSE, BETTER = "✗", "✓"


def table(results: dict[str, Any]) -> str:
    """A section for each model, with a row for each way to train: its loss, metric and bytes beside those of all-reduce.

    Losses are means of seeds with their standard deviation. A row is marked where its mean is further from all-reduce's than
    `noise`. Seeds that a row lacks count for none, and a model with fewer than two is left out.
    """
    parts = []
    for name, task in MODELS.items():
        if name not in results:
            continue
        runs = results[name]["runs"]
        common = set.intersection(*({*seeds} for seeds in runs.values()))
        if len(common) < 2:
            continue
        part = {"runs": {label: {seed: seeds[seed] for seed in sorted(common)} for label, seeds in runs.items()}}
        rows = paired.summary(part, task)
        base = next(row for row in rows if row["label"] == BASELINE)
        metric = task.metric_name
        shown = [
            [
                row["label"],
                f"{row['loss']:.4f} ± {row['loss_deviation']:.4f}",
                f"{statistics.fmean(row['loss_differences']):+.4f}{mark(row, base)}" if row is not base else "",
                f"{row[metric]:.4f} ± {row[f'{metric}_deviation']:.4f}",
                f"{row['bytes_per_step'] / 1e3:,.1f}",
            ]
            for row in sorted(rows, key=lambda row: (math.isnan(row["loss"]), row["loss"]))
        ]
        steps = results[name]["settings"]["steps"]
        head = f"### {TITLES[name]}"
        about = f"{steps:,} steps of {task.batch} samples a rank, {len(base['seeds'])} seeds."
        headings = ["row", "loss", "beside all-reduce", metric, "kB a step"]
        parts.append("\n\n".join([head, about, markdown.table(headings, shown)]))
    return "\n\n".join(parts)


def noise(base: dict[str, Any]) -> float:
    """Two standard deviations of the difference of two means, which seeds alone would make."""
    return 2 * float(base["loss_deviation"]) * math.sqrt(2 / len(base["seeds"]))


def mark(row: dict[str, Any], base: dict[str, Any]) -> str:
    """What is behind the difference of a row: nothing where it is within `noise`."""
    difference = statistics.fmean(row["loss_differences"])
    # A loss that is not a number is worse, too.
    if not difference <= noise(base):
        return f" {WORSE}"
    return f" {BETTER}" if difference < -noise(base) else ""
