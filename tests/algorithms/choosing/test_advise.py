"""The adviser's command."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest

from bagua_kernels.algorithms.choosing.advise import command
from bagua_kernels.algorithms.choosing.advise.models import MODELS
from bagua_kernels.algorithms.choosing.cost.facts import GPU, Job, Machine, Network
from bagua_kernels.algorithms.choosing.cost.methods import methods
from tests.grids import grid

NETWORK = ("--ranks", "64", "--bandwidth", "10Gbps", "--latency", "1ms")


def test_a_table_of_all_methods(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--model", "resnet50", *NETWORK]) == 0
    text = capsys.readouterr().out
    assert all(method.name in text for method in methods())
    assert "64 nodes of 1, 10 Gbit/s, 1 ms" in text
    assert "25,502,912 parameters" in text


def test_what_is_to_be_copied_is_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the output has the width of no screen."""
    monkeypatch.setenv("COLUMNS", "80")
    command.main(["--model", "resnet50", *NETWORK])
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert len(rows) == len(methods())
    assert all(any(f" {method.spec} " in row for row in rows) for method in methods())


def test_the_order_is_said_to_be_that_of_time(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--model", "resnet50", *NETWORK])
    text = capsys.readouterr().out
    assert "order is that of time alone" in text
    assert "The fastest that changes nothing: GradientAllReduce" in text
    words = {method.name: command.loss(method) for method in methods()}
    assert words["DDP"] == words["GradientAllReduce"] == "the same"
    assert words["TopK 1 %"] == words["PowerSGD 1"] == words["SignSGD"] == "higher with Adam"
    assert words["ByteGrad"] == words["4 bits"] == words["OneBitAdam"] == words["DDP fp16"] == "almost the same"
    assert words["LocalSGD 16"] == "measure it"


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To the standard output alone, or to a file beside the table."""
    assert command.main(["--model", "resnet50", *NETWORK, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {row["method"] for row in printed["methods"]} == {method.name for method in methods()}
    times = [row["seconds"] for row in printed["methods"]]
    assert times == sorted(times)
    assert next(row for row in printed["methods"] if row["method"] == "DDP")["of_ddp"] == 1.0
    path = tmp_path / "advice.json"
    assert command.main(["--model", "resnet50", *NETWORK, "--json", str(path)]) == 0
    assert "s a step" in capsys.readouterr().out
    assert json.loads(path.read_text()) == printed


def test_a_plot_that_cannot_be_drawn_is_told_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "ranked", lambda *_: pytest.fail("it computed first"))
    with pytest.raises(SystemExit) as ended:
        command.main(["--model", "vgg16", *NETWORK, "--plot", str(tmp_path / "plot.png")])
    assert ended.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_only_what_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--model", "vgg16", *NETWORK, "--exactness", "exact"])
    text = capsys.readouterr().out
    assert "GradientAllReduce" in text
    assert "ByteGrad" not in text
    command.main(["--model", "vgg16", *NETWORK, "--exactness", "synchronous"])
    text = capsys.readouterr().out
    assert "ByteGrad" in text
    assert "Decentralized" not in text


def test_a_profile_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    machine = Machine(0.5, 1e-9, {"": 1e-9}, 2e-9)
    machine.save(path)
    assert Machine.load(path) == machine
    assert command.main(["--elements", "1000", "--step", "20ms", *NETWORK, "--profile", str(path)]) == 0
    assert f"machineof{path}" in "".join(capsys.readouterr().out.split())
    path.write_text('{"nothing": 1}')
    with pytest.raises(ValueError, match="no profile of a machine"):
        Machine.load(path)


def test_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra of the examples")
    path = tmp_path / "plot.png"
    assert command.main(["--model", "bert_large", *NETWORK, "--per-node", "8", "--plot", str(path)]) == 0
    assert path.stat().st_size > 10_000


def test_curves_reach_thousands_of_ranks() -> None:
    job = Job(0.1, MODELS["gpt2"]().matrices)
    ranks, times = command.curves(job, GPU, Network(64, 1e10, 1e-3, 8), methods())
    assert ranks[0] == 8
    assert ranks[-1] == 4096
    assert len(times) == len(methods())
    assert all(math.isfinite(one) for values in times for one in values)


def test_models_have_their_published_sizes() -> None:
    """In millions, without biases and norms."""
    sizes = {name: sum(m * n for m, n in make().matrices) / 1e6 for name, make in MODELS.items()}
    expected = {"vgg16": 138.3, "resnet50": 25.5, "bert_large": 333.8, "bert_base": 108.8, "gpt2": 124.3}
    assert sizes == pytest.approx(expected, rel=0.002)


@pytest.mark.parametrize(
    ("text", "bits"), [("10Gbps", 1e10), ("100 Mbit/s", 1e8), ("1e9", 1e9), ("2.5G", 2.5e9), ("1kbit", 1e3)]
)
def test_bandwidths(text: str, bits: float) -> None:
    assert command.bits_per_second(text) == bits


@pytest.mark.parametrize(("text", "found"), [("1ms", 1e-3), ("50us", 5e-5), ("0.2", 0.2), ("2s", 2.0)])
def test_times(text: str, found: float) -> None:
    assert command.seconds(text) == pytest.approx(found)


@grid(
    cover=1,
    arguments=[
        ["--ranks", "4"],
        [*NETWORK],
        ["--elements", "3", *NETWORK],
        ["--model", "vgg16", "--ranks", "4", "--bandwidth", "fast"],
        ["--model", "vgg16", "--ranks", "4", "--bandwidth", "1G", "--latency", "soon"],
        ["--model", "vgg16", "--ranks", "0", "--bandwidth", "1G"],
        ["--model", "vgg16", "--ranks", "9", "--per-node", "8", "--bandwidth", "1G"],
        ["--model", "vgg16", *NETWORK, "--step", "0"],
        ["--model", "vgg16", *NETWORK, "--bucket-bytes", "0"],
        ["--model", "vgg16", *NETWORK, "--profile", "nowhere.json"],
        ["--elements", "0", "--step", "1s", *NETWORK],
    ],
)
def test_what_is_missing(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
