"""The figures of docs/elastic.md are those of the committed file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.figures


def rows() -> list[str]:
    found = ["| | after a kill: median | worst | longest gap in a join: median | worst |", "|---|---|---|---|---|"]
    for one in json.loads((ROOT / "bench/results/healing.json").read_text()):
        loss, gap = one["loss_seconds"], one["gap_seconds"]
        figures = " | ".join(f"{each:.2f} s" for each in (loss["median"], loss["worst"], gap["median"], gap["worst"]))
        found.append(f"| `{one['spec']}`, {one['kills']} kills | {figures} |")
    return found


def test_times_are_those_of_the_file() -> None:
    assert "\n".join(rows()) in (ROOT / "docs/elastic.md").read_text()


def rows_of_restarts() -> list[str]:
    found = [
        "| | loss | without kills | samples lost, doubled | useful steps | a new step after: median | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in json.loads((ROOT / "bench/results/restarts.json").read_text()):
        assert one["finished"]
        seconds = one["new_step_seconds"]
        figures = [
            f"{one['loss']:.4f} | {one['undisturbed_loss']:.4f}",
            f"{one['lost_samples']}, {one['doubled_samples']} of {one['samples']:,}",
            f"{one['useful_steps']:,} of {one['all_steps']:,}",
            f"{seconds['median']:.0f} s | {seconds['worst']:.0f} s",
        ]
        found.append(f"| `{one['spec']}`, {one['kills']} kills | {' | '.join(figures)} |")
    return found


def test_restarts_are_those_of_the_file() -> None:
    assert "\n".join(rows_of_restarts()) in (ROOT / "docs/elastic.md").read_text()


def rows_of_cuts() -> list[str]:
    found = ["| | hosts | go on | raise | the last one knows after |", "|---|---|---|---|---|"]
    for one in json.loads((ROOT / "bench/results/cuts.json").read_text()):
        sides = [
            [str(rank) for rank, each in enumerate(one["ranks"]) if each["goes_on"] is side] for side in (True, False)
        ]
        names = " | ".join(", ".join(side) or "none" for side in sides)
        seconds = max(each["seconds"] for each in one["ranks"])
        found.append(f"| `{one['spec']}` | {one['case']} | {names} | {seconds:.1f} s |")
    return found


def test_cuts_are_those_of_the_file() -> None:
    assert "\n".join(rows_of_cuts()) in (ROOT / "docs/elastic.md").read_text()


def rows_of_goodput() -> list[str]:
    found = ["| | steps of all ranks in a second | share that lives | goodput |", "|---|---|---|---|"]
    for one in json.loads((ROOT / "bench/results/goodput.json").read_text()):
        name = one["spec"] if one["way"] != "ours" else f"`{one['spec']}`"
        figures = f"{one['undisturbed_steps_per_second']:.0f} | {one['living_share']:.2f} | {one['goodput']:.2f}"
        found.append(f"| {name} | {figures} |")
    return found


def test_goodput_is_that_of_the_file() -> None:
    assert "\n".join(rows_of_goodput()) in (ROOT / "docs/elastic.md").read_text()


def rows_of_cost() -> list[str]:
    found = [
        "| | Mbit/s | fully connected: ratio | 95 % | transformer: ratio | 95 % |",
        "|---|---|---|---|---|---|",
    ]
    models = json.loads((ROOT / "bench/results/healing_cost.json").read_text())
    others = {(row["name"], row["rate_mbit"]): row for row in models["tr"]}
    for one in models["fc"]:
        rate = "no limit" if one["rate_mbit"] is None else f"{one['rate_mbit']:.0f}"
        both = (one, others[one["name"], one["rate_mbit"]])
        figures = [f"{row['ratio']:.2f} | {row['interval'][0]:.2f} to {row['interval'][1]:.2f}" for row in both]
        found.append(f"| `{one['name']}` | {rate} | {' | '.join(figures)} |")
    return found


def test_cost_is_that_of_the_file() -> None:
    assert "\n".join(rows_of_cost()) in (ROOT / "docs/elastic.md").read_text()
