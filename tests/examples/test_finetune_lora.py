"""The example of LoRA through PEFT and Accelerate, from the command line to the picture, and what ends it."""

import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from bench.netlab.lab import available
from tests import limits

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples/finetune_lora.py"
SMALL = ("--size", "tiny", "--seeds", "2", "--steps", "20", "--turns", "2", "--base-steps", "100")
PACKAGES = ("accelerate", "matplotlib", "peft", "transformers")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
# They are installed in `.venv-doors` alone.
with_packages = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
with_picture = pytest.mark.skipif("matplotlib" in MISSING, reason="matplotlib is not installed")


def run(*arguments: str | Path, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, str(PROGRAM), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limits.seconds(300), check=False
    )


@with_packages
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_from_the_command_line_to_the_picture(tmp_path: Path) -> None:
    """Where hosts can be emulated, all ways are measured; elsewhere the program prints why they cannot, and trains."""
    result = run(*SMALL, "--rates", "100", "--output", tmp_path)
    assert result.returncode == 0, result.stderr
    numbers = json.loads((tmp_path / "finetune_lora.json").read_text())
    assert (tmp_path / "finetune_lora.png").stat().st_size > 10_000
    assert sorted(file.name for file in tmp_path.iterdir()) == ["finetune_lora.json", "finetune_lora.png"]
    for way in ("ddp", "diloco", "alone"):
        assert len(numbers["losses"][way]["validation"]) == 2
        # Random weights have a loss of log(128) = 4.85.
        assert all(0 < loss < 4.2 for loss in numbers["losses"][way]["validation"])
    if reason := available(delay=False):
        assert reason in result.stdout
        assert "training with two processes on this machine instead" in result.stdout
        assert numbers["rates"] == {}
        return
    ways = numbers["rates"]["100"]["ways"]
    assert list(ways) == ["alone", "ddp", "bytegrad", "diloco"]
    assert ways["alone"]["throughput"] == 1
    assert ways["bytegrad"]["base_bytes_sent"] == ways["diloco"]["base_bytes_sent"] == 0
    assert ways["ddp"]["base_bytes_sent"] == numbers["rates"]["100"]["base_bytes"]
    assert 0 < ways["diloco"]["bytes_per_step"] < ways["bytegrad"]["bytes_per_step"] < ways["ddp"]["bytes_per_step"]


@with_packages
def test_the_same_base_on_all_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Random weights, or those of a file."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    base_of = importlib.import_module("finetune_base").base_of
    first, second = base_of("tiny").state_dict(), base_of("tiny").state_dict()
    assert all(torch.equal(second[name], value) for name, value in first.items())
    torch.save({name: value + 1 for name, value in first.items()}, tmp_path / "base.pt")
    loaded = base_of("tiny", tmp_path / "base.pt").state_dict()
    assert all(torch.equal(loaded[name], value + 1) for name, value in first.items())


@with_packages
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_under_a_launcher(tmp_path: Path) -> None:
    """Ranks train at once, and the first one writes losses."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    result = run(*SMALL, "--ways", "bytegrad", "diloco", "--output", tmp_path, launcher=launcher)
    assert result.returncode == 0, result.stderr
    losses = json.loads((tmp_path / "finetune_losses.json").read_text())
    assert {way: len(runs) for way, runs in losses.items()} == {"bytegrad": 2, "diloco": 2}
    # The same start and the same data.
    assert losses["bytegrad"][0]["loss"][0] == losses["diloco"][0]["loss"][0]


@pytest.fixture
def finetune_report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imported as scripts do, with its neighbours as top-level modules."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    return importlib.import_module("finetune_report")


def measured(slower: float) -> dict[str, Any]:
    """What a rank measures whose exchanges take so many times as long as computing."""
    ways = {"alone": (1.0, 10.0), "ddp": (slower, 4000.0), "bytegrad": (1.5, 1000.0), "diloco": (1.25, 60.0)}
    turn = {way: {"seconds": seconds, "bytes": sent} for way, (seconds, sent) in ways.items()}
    return {
        "turns": [turn] * 3,
        "start_bytes": {"alone": 0, "ddp": 1_000_100, "bytegrad": 700, "diloco": 800},
        "start_seconds": dict.fromkeys(ways, 2.0),
        "trained_bytes": 4000,
        "base_bytes": 1_000_000,
    }


@with_picture
def test_ranks_and_turns_are_summed_up(finetune_report: ModuleType) -> None:
    found = finetune_report._summary([measured(3.0), measured(5.0)])
    assert {way: one["throughput"] for way, one in found["ways"].items()} == {
        "alone": 1.0, "ddp": 0.25, "bytegrad": 1 / 1.5, "diloco": 0.8,
    }  # fmt: skip
    assert {way: one["base_bytes_sent"] for way, one in found["ways"].items()} == {
        "alone": 0, "ddp": 1_000_000, "bytegrad": 0, "diloco": 0,
    }  # fmt: skip


@with_picture
@pytest.mark.parametrize("reason", ["", "no lab here: a lab takes root"])
def test_table_and_picture(finetune_report: ModuleType, reason: str, tmp_path: Path) -> None:
    summary = finetune_report._summary([measured(4.0)])
    numbers = {
        "size": "small",
        "steps": 2,
        "reason": reason,
        "rates": {} if reason else {"100": summary, "10": summary},
        "losses": {
            way: {"validation": [3.25, 3.5], "training": [[4.0, 3.0]] * 2} for way in ("ddp", "diloco", "alone")
        },
    }
    console = Console(record=True, width=120)
    console.print(finetune_report.table(numbers))
    text = console.export_text()
    assert "3.250, 3.500" in text
    assert (reason in text) if reason else (text.count("DiLoCo, 8 bits ") == 2 and text.count("DDP ") == 2)
    finetune_report.picture(numbers, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def rows(numbers: dict[str, Any]) -> list[str]:
    """The table of docs/finetune-lora.md."""
    labels = {"ddp": "DistributedDataParallel", "bytegrad": "ByteGrad, 8 bits", "diloco": "DiLoCo, 8 bits"}
    return [
        f"| {label} | {rate} | {one['throughput']:.2f} | {one['throughput_of_fastest']:.2f} "
        f"| {one['bytes_per_step'] / 1000:,.1f} | {one['base_bytes_sent'] / 1e6:.1f} | {one['start_seconds']:.1f} |"
        for rate, summary in numbers["rates"].items()
        for way, label in labels.items()
        for one in (summary["ways"][way],)
    ]


def test_figures_of_the_page_are_those_of_the_committed_file() -> None:
    numbers = json.loads((ROOT / "bench/results/finetune_lora.json").read_text())
    page = " ".join((ROOT / "docs/finetune-lora.md").read_text().split())
    losses = {way: one["validation"] for way, one in numbers["losses"].items()}
    seconds = {way: numbers["steps"] * one["seconds_per_step"] for way, one in numbers["rates"]["10"]["ways"].items()}
    at = [summary["ways"] for summary in numbers["rates"].values()]
    starts = [ways[way]["start_bytes"] for ways in at for way in ("bytegrad", "diloco")]
    means = {way: statistics.fmean(values) for way, values in losses.items()}
    gap = means["diloco"] - means["ddp"]
    expected = [
        *rows(numbers),
        *(f"{', '.join(f'{value:.3f}' for value in sorted(values))}" for values in losses.values()),
        *(f"| {mean:.3f} |" for mean in means.values()),
        f"differ by {gap:.3f}",
        f"{gap / statistics.stdev(losses['ddp']):.1f} standard deviations",
        f"{numbers['steps']} steps",
        f"{seconds['ddp']:.0f} s with DistributedDataParallel and {seconds['diloco']:.0f} s with DiLoCo",
        f"{numbers['rates']['10']['base_bytes'] / 1e6:.0f} MB",
        f"at most {max(starts) / 1000:.1f} kB",
    ]
    large = json.loads((ROOT / "bench/results/gpt2/finetune_lora.json").read_text())["rates"]["100"]
    expected += [
        f"| {one['throughput']:.2f} | {one['bytes_per_step'] / 1000:,.1f} | {one['base_bytes_sent'] / 1e6:.1f} "
        f"| {one['start_seconds']:.1f} |"
        for way, one in large["ways"].items()
        if way != "alone"
    ]
    expected += [
        f"adapters of {large['trained_bytes'] / 4e6:.1f} M",
        f"{large['base_bytes'] / 4e6:.0f} M parameters",
    ]
    for one in expected:
        assert one in page, one
