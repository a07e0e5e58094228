"""What the study shows: the time until an accuracy is reached, the winner on each network, and what a straggler costs."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.tradeoff.ways import BATCH, SYNCHRONOUS, Way

HALF_A_POINT = 0.005
DDP, PLAIN = "ddp", "allreduce"

Results = dict[str, Any]


def runs_of(results: Results, way: Way) -> dict[str, list[float]]:
    """Accuracies of each seed of a way, or of what makes the same steps."""
    runs: dict[str, list[float]] = results["curves"][way.curve or way.name]["runs"]
    return runs


def plain_of(results: Results, way: Way) -> dict[str, list[float]]:
    """Accuracies of exact means, of the seeds of a way."""
    return {seed: results["curves"][PLAIN]["runs"][seed] for seed in runs_of(results, way)}


def means(runs: dict[str, list[float]]) -> list[float]:
    """The mean over seeds at each look."""
    return [statistics.fmean(each) for each in zip(*runs.values(), strict=True)]


def differences(results: Results, way: Way) -> list[float]:
    """For each seed, how much better the final accuracy is than that of exact means with the same start and examples."""
    plain = plain_of(results, way)
    return [points[-1] - plain[seed][-1] for seed, points in runs_of(results, way).items()]


def steps_until(points: list[float], least: float, steps: int) -> float | None:
    """Steps until a curve is at an accuracy to stay, between two looks by a straight line; None if it does not get there."""
    below = [place for place, accuracy in enumerate(points) if accuracy < least]
    if not below:
        return steps / len(points)
    if below[-1] == len(points) - 1:
        return None
    place = below[-1]
    share = (least - points[place]) / (points[place + 1] - points[place])
    return (place + 1 + share) * steps / len(points)


def steps_of(results: Results, way: Way) -> int | None:
    """Steps until a way is at the accuracy of exact means with its seeds, less half a point; None if it does not get there.

    On the way fewer images are looked at than at the end. So curves are compared up to the last look before the end, and
    final accuracies with each other.
    """
    if statistics.fmean(differences(results, way)) < -HALF_A_POINT:
        return None
    return steps_beside(means(runs_of(results, way)), means(plain_of(results, way)), results["settings"]["steps"])


def steps_beside(points: list[float], plain: list[float], steps: int, margin: float = HALF_A_POINT) -> int:
    """Steps until a curve is where another one ends, less a margin; all steps if it is there at the end only.

    On the way that is where the other one has its last look before the end.
    """
    until = steps_until(points[:-1], plain[-2] - margin, steps * (len(points) - 1) // len(points))
    return steps if until is None else round(until)


def seconds_of(row: dict[str, Any], way: Way, count: int, steps: int) -> float:
    """Seconds of so many steps, of which the first may be those of exact means."""
    first = min(count, round(way.exact * steps))
    own, exact = (statistics.median(row["seconds"][name]) for name in (way.name, PLAIN))
    return first * exact + (count - first) * own


def times(results: Results, row: dict[str, Any], ways: list[Way]) -> dict[str, tuple[float, float]]:
    """Seconds until each way is there, and those of DDP with the same seeds; without what does not get there."""
    steps, found = results["settings"]["steps"], {}
    for way in ways:
        if (count := steps_of(results, way)) is not None:
            plain = means(plain_of(results, way))
            same = steps_beside(plain, plain, steps) * statistics.median(row["seconds"][DDP])
            found[way.name] = seconds_of(row, way, count, steps), same
    return found


def place(row: dict[str, Any]) -> str:
    """A cell's name."""
    parts = [f"{row['rate']:g} Mbit/s"]
    parts += [] if row["delay"] is None else [f"{row['delay']:g} ms"]
    parts += ["straggler"] * row["straggler"]
    return ", ".join(parts) + (f", batch {row['batch']}" if row["batch"] != BATCH else "")


def fastest(sooner: dict[str, float], ways: list[Way], kinds: tuple[str, ...]) -> str:
    """The way of some kinds that is there most times sooner than DDP."""
    names = [way.name for way in ways if way.kind in kinds and way.name in sooner]
    return max(names, key=lambda name: sooner[name])


def summary(results: Results, ways: list[Way]) -> list[dict[str, Any]]:
    """Of each cell: the winner, the best that leaves all ranks the same bits, how many times sooner, and how many ways are."""
    found = []
    for row in results["cells"]:
        seconds = times(results, row, ways)
        sooner = {name: ddp / own for name, (own, ddp) in seconds.items()}
        kinds = {way.kind for way in ways}
        best, alike = fastest(sooner, ways, tuple(kinds)), fastest(sooner, ways, SYNCHRONOUS)
        found.append(
            {
                **{name: row[name] for name in ("rate", "delay", "straggler", "batch")},
                "winner": best,
                "sooner": sooner[best],
                "synchronous": alike,
                "synchronous_sooner": sooner[alike],
                "ddp_seconds": seconds[DDP][0],
                "helping": sum(ratio > 1 for name, ratio in sooner.items() if name != DDP),
                "all": sooner,
            }
        )
    return found


def losses_by_straggler(results: Results, ways: list[Way]) -> list[dict[str, Any]]:
    """For each network, what part of its own throughput each way keeps with a straggler."""
    found = []
    for row in results["cells"]:
        if not row["straggler"]:
            continue
        same = [one for one in results["cells"] if _network(one) == _network(row)]
        alone = next(one for one in same if not one["straggler"])
        medians = [{name: statistics.median(each) for name, each in one["seconds"].items()} for one in (alone, row)]
        kept = {name: medians[0][name] / medians[1][name] for name in medians[1]}
        asynchronous = [way.name for way in ways if way.kind == "asynchronous"]
        best = max(asynchronous, key=lambda name: 1 / medians[1][name])
        found.append({**_network(row), "best": best, "keeps": kept[best], "ddp_keeps": kept[DDP], "all": kept})
    return found


def _network(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("rate", "delay", "batch")}


def show(console: Console, results: Results, ways: list[Way]) -> None:
    """Prints accuracies, winners and what a straggler costs."""
    grid = Table(title=f"accuracy after {results['settings']['steps']} steps", title_justify="left")
    for heading in ("", "accuracy", "against exact means, points", "by seed"):
        grid.add_column(heading, justify="right" if heading else "left")
    for way in ways:
        if not way.curve:
            each = differences(results, way)
            seeds = " ".join(f"{100 * one:+.2f}" for one in each)
            grid.add_row(
                way.name, f"{means(runs_of(results, way))[-1]:.2%}", f"{100 * statistics.fmean(each):+.2f}", seeds
            )
    console.print(grid)
    grid = Table(title="sooner than DDP at its accuracy less half a point", title_justify="left")
    for heading in ("network", "DDP, s", "winner", "times", "same bits on all ranks", "times ", "sooner than DDP"):
        grid.add_column(heading, justify="right")
    for one in summary(results, ways):
        numbers = f"{one['sooner']:.2f}", one["synchronous"], f"{one['synchronous_sooner']:.2f}"
        helping = f"{one['helping']} of {len(ways) - 1}"
        grid.add_row(place(one), f"{one['ddp_seconds']:.1f}", one["winner"], *numbers, helping)
    console.print(grid)
    slow = losses_by_straggler(results, ways)
    if slow:
        grid = Table(title="throughput that is left with a straggler", title_justify="left")
        for heading in ("network", "best asynchronous", "keeps", "DDP keeps"):
            grid.add_column(heading, justify="right")
        for one in slow:
            grid.add_row(
                place({**one, "straggler": False}), one["best"], f"{one['keeps']:.2f}", f"{one['ddp_keeps']:.2f}"
            )
        console.print(grid)


def plot(results: Results, ways: list[Way], path: Path) -> None:
    """Draws the winner of each network, coloured by how many times sooner than DDP it is there."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    rows = summary(results, ways)
    networks = list(dict.fromkeys((one["rate"], one["delay"], one["batch"]) for one in rows))
    columns = [("winner", "sooner", False), ("synchronous", "synchronous_sooner", False), ("winner", "sooner", True)]
    titles = ["all algorithms", "same bits on all ranks", "all, with a straggler"]
    if not any(one["straggler"] for one in rows):
        columns, titles = columns[:2], titles[:2]
    found = {(one["rate"], one["delay"], one["batch"], one["straggler"]): one for one in rows}
    values = [[found.get((*at, slow), {}).get(key, float("nan")) for _, key, slow in columns] for at in networks]
    figure, axes = plt.subplots(figsize=(3.2 * len(columns), 0.55 * len(networks) + 1.6), layout="constrained")
    image = axes.imshow(values, norm=LogNorm(1, 50), cmap="viridis", aspect="auto")
    for y, at in enumerate(networks):
        for x, (name, key, slow) in enumerate(columns):
            if one := found.get((*at, slow)):
                colour = "white" if one[key] < 8 else "black"
                axes.text(
                    x, y, f"{one[name]}\n{one[key]:.1f} x", ha="center", va="center", color=colour, fontsize="small"
                )
    names = [
        place({"rate": rate, "delay": delay, "batch": batch, "straggler": False}) for rate, delay, batch in networks
    ]
    axes.set_yticks(range(len(networks)), names)
    axes.set_xticks(range(len(columns)), titles)
    axes.xaxis.tick_top()
    figure.colorbar(image, label="times sooner than DDP")
    figure.savefig(path, dpi=120)
    plt.close(figure)
