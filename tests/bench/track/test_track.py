"""The slow-link track: when ranks end, what is made of what they have found, and which entrants there are."""

from __future__ import annotations

import random
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.track import measure, page, rank, report
from bench.track.cell import CELLS, Cell
from bench.track.loop import Loop, Pace, Windows
from tests import limits
from tests.grids import grid

RANKS = 3
VALUES = torch.arange(40).view(10, 4)


def loop_of(folder: Path, number: int, seconds: float) -> Loop:
    settings = {"ranks": RANKS, "seconds": seconds, "folder": str(folder), "addresses": ["127.0.0.1"] * RANKS}
    return Loop(settings, number, torch.nn.Linear(2, 2), Windows(VALUES, VALUES + 1, 2, number))


def steps_of(folder: Path, pace: Pace, late: int) -> list[int]:
    """How many steps ranks take, whose clocks are over at a moment that none of them knows before."""
    loops = [loop_of(folder, number, 0.2) for number in range(RANKS)]
    (folder / "begun").write_bytes(bytes(8 * RANKS))
    began, counts = time.monotonic(), [0] * RANKS

    def train(number: int) -> None:
        naps = random.Random(number)
        while loops[number]._goes_on(began, pace):
            counts[number] += 1
            time.sleep(naps.uniform(0, 0.02 if number == late else 0.004))

    threads = [threading.Thread(target=train, args=(number,)) for number in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limits.seconds(60))
        assert not thread.is_alive()
    assert list(struct.unpack(f"<{RANKS}q", (folder / "begun").read_bytes())) == counts
    return counts


@grid(late=[0, 1, 2])
def test_ranks_in_step_end_with_the_same_step(tmp_path: Path, late: int) -> None:
    """Otherwise one would wait for others that have ended."""
    counts = steps_of(tmp_path, "together", late)
    assert counts == [counts[0]] * RANKS
    assert counts[0] > 0


def test_ranks_at_their_own_pace_end_by_themselves(tmp_path: Path) -> None:
    counts = steps_of(tmp_path, "own", 2)
    assert all(counts)


def test_ranks_draw_other_windows_than_each_other(tmp_path: Path) -> None:
    first, second = loop_of(tmp_path, 0, 1.0), loop_of(tmp_path, 1, 1.0)
    for own in (first, second):
        x, y = own._data.draw(3)
        assert x.shape == y.shape == (2, 4)
        assert torch.equal(y, x + 1)
        assert torch.equal(own._data.draw(3)[0], x)
    assert any(not torch.equal(first._data.draw(i)[0], second._data.draw(i)[0]) for i in range(4))


def test_a_share_that_nobody_gives_ends_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.track.loop._PATIENCE", 0.05)
    loop = loop_of(tmp_path, 0, 1.0)
    loop.share("greeting", [1, "a"])
    assert loop.shared("greeting") == [1, "a"]
    with pytest.raises(TimeoutError, match=r"rank 0 has waited 0\.05 s for peers"):
        loop.shared("peers")


def test_losses_are_those_of_mean_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may have been looked at less often than others: its last look belongs to the last ones of all."""
    monkeypatch.setattr(measure, "loss_of", lambda state: float(state["w"].sum()))

    def looks(*values: float) -> list[tuple[float, dict[str, torch.Tensor]]]:
        return [(10.0 * place, {"w": torch.full((2,), float(value))}) for place, value in enumerate(values)]

    common = {"sent": 5, "seconds": 20.0, "compute": 0.1}
    found = measure.described(
        [{**common, "steps": 7, "looks": looks(1, 2, 3)}, {**common, "steps": 6, "looks": looks(3, 5)}]
    )
    assert found["curve"] == [[0.0, 4.0], [15.0, 8.0]]
    assert (found["loss"], found["bytes"], found["steps"]) == (8.0, 10, [7, 6])


# PyTorch's own optimizers for its hooks.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_all_files_are_entrants() -> None:
    files = measure.files_of(None)
    assert len(files) == 14
    for path in files:
        entrant: Any = rank.entrant(path)
        assert entrant.TITLE
        assert entrant.PACKAGE
        assert entrant.__doc__
        assert callable(entrant.train)


def test_a_stranger_adds_a_file(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("")
    assert measure.files_of([str(own), "ddp"]) == [own, measure.FOLDER / "ddp.py"]
    with pytest.raises(ValueError, match="no entrant nobody"):
        measure.files_of(["nobody"])


def test_what_is_not_installed_is_a_reason_and_no_result() -> None:
    with pytest.raises(LookupError, match="no-such-package is not installed"):
        measure.environment_of("no-such-package")


def test_cells_have_names_and_titles() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS) == 16
    assert Cell(10.0, 20.0, True).name == "10-20-slow"
    assert Cell(10.0, 20.0, True).title == "10 Mbit/s, 20 ms, one rank half as fast"


def test_entrants_are_ranked_by_their_losses() -> None:
    rows: dict[str, Any] = {
        "a": {"title": "A", "loss": 2.0, "bytes": 3e6, "steps": [4, 6]},
        "b": {"title": "B", "error": "lines\nof words"},
        "c": {"title": "C", "loss": 1.0, "bytes": 1e6, "steps": [1, 1], "note": "hello"},
    }
    assert [name for name, _ in report.ranked(rows)] == ["c", "a", "b"]
    assert report.line(rows["a"]) == "A: loss 2.000, 3.0 MB, 5 steps a rank"
    assert report.line(rows["b"]) == "B has not trained: of words"
    assert report.line(rows["c"]) == "C (hello): loss 1.000, 1.0 MB, 1 steps a rank"


def test_the_page_has_a_column_for_each_cell_and_says_who_leads() -> None:
    def row(package: str, title: str, loss: float | None) -> dict[str, Any]:
        found = {"package": package, "title": title, "version": "2"}
        return {**found, "error": "words"} if loss is None else {**found, "loss": loss, "bytes": 2.4e6}

    a, b, c = row(page.OURS, "A", 1.5), row("torch", "B", 1.25), row("torch", "C", None)
    results = {
        "cells": {
            "10-0-slow": {"a": a, "b": b, "c": c},
            "10-0-equal": {"a": {**a, "loss": 1.0}, "b": b},
            "1-0-slow": {},
        }
    }
    assert page.table(results).splitlines() == [
        "| entrant | package | 10 Mbit/s, equal machines | 10 Mbit/s, one rank half as fast |",
        "|---|---|---|---|",
        "| A | this one | **1.000**, 2 MB | 1.500, 2 MB |",
        "| B | torch 2 | 1.250, 2 MB | **1.250**, 2 MB |",
        "| C | torch 2 |  | not trained |",
        "",
        "- 10 Mbit/s, one rank half as fast: B leads, by 0.250 nats before A, the best of this one.",
        "- 10 Mbit/s, equal machines: A leads, by 0.250 nats before B, the best of other packages.",
    ]
    assert page.leads(results) == {"10-0-equal": ("a", "b", 0.25), "10-0-slow": ("a", "b", -0.25)}
