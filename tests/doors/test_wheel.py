"""The wheel alone, outside of the repository: every command runs, and so does every example that was copied."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bagua_kernels.command.main import commands
from tests.doors.jobs import needs, outside

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
COMMANDS = {
    "advise": ["--model", "resnet50", "--ranks", "64", "--bandwidth", "10Gbps", "--latency", "1ms"],
    "algorithms": [],
    "bench": ["--json"],
    "codecs": ["--json"],
    "doctor": ["--timeout", "20"],
    "launch-check": ["--json"],
    # Behind it comes the launcher.
    "tune": ["--budget", "1", "--dry-run", "--"],
    "version": ["--json"],
    "warmup": ["bytegrad", "--optimizers", "SGD"],
}


@needs("lightning", "accelerate", "transformers", "ray")
def test_every_command_runs(installed: Path, tmp_path: Path) -> None:
    assert set(commands.commands) == set(COMMANDS)
    launcher = [
        installed / "python",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "train.py",
    ]
    for name, words in COMMANDS.items():
        behind = launcher if name == "tune" else []
        done = outside([installed / "bagua-kernels", name, *words, *behind], tmp_path)
        assert done.returncode == 0, f"{name}: {done.stdout[-1500:]}{done.stderr[-1500:]}"
        # A bar of progress goes to the other stream.
        assert (done.stderr if name == "warmup" else done.stdout).strip(), name
        if "--json" in words:
            json.loads(done.stdout)
    asked = outside([installed / "python", "-c", "import bagua_kernels; print(bagua_kernels.__file__)"], tmp_path)
    assert Path(asked.stdout.strip()).is_relative_to(installed.parent)


@needs("lightning", "accelerate", "transformers", "ray")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train_images.py", ["--epochs", "1", "--algorithm", "bytegrad"]),
        ("train_text.py", ["--rate", "10", "--steps", "4", "--evaluations", "1", "--width", "16", "--layers", "1"]),
        ("finetune_lora.py", ["--size", "tiny", "--steps", "4", "--seeds", "1", "--turns", "1"]),
    ],
)
def test_a_copied_example_trains(name: str, words: list[str], installed: Path, tmp_path: Path) -> None:
    """What emulates hosts is not in the wheel: the others print why they train on one machine."""
    for file in (ROOT / "examples").glob("*.py"):
        shutil.copy2(file, tmp_path)
    done = outside([installed / "python", name, *words, "--output", tmp_path / "results"], tmp_path, 200)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    assert list((tmp_path / "results").glob("*.json"))
    if name != "train_images.py":
        assert "machine" in done.stdout
        assert "no emulated hosts: they need the folder bench" in done.stdout
