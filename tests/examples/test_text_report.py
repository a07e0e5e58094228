"""The table, the numbers and the picture that end `train_text.py`, and the model that it trains."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from examples.transformer import Transformer

pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = nn.Linear(9, 10)  # 100 parameters


@pytest.fixture
def text_report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imported as scripts do, with its neighbours as top-level modules."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    return importlib.import_module("text_report")


def run(text_report: ModuleType, name: str, steps: int) -> Any:
    result = text_report.report.Run(name, MODEL, steps, rank=1, ranks=2, unit="characters", evaluation="{:.3f}")
    for step in range(1, steps + 1):
        result.step(4 / step, 64, SimpleNamespace(bytes_sent=step * 100, wait_seconds=step * 0.005))
        if step % 10 == 0:
            result.evaluation(4 / step)
    result.seconds = [0.01 * step for step in range(1, steps + 1)]
    return result


def test_extrapolated_times_are_marked(
    text_report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = []
    original = text_report.plt.Figure.legend

    def legend(self: Any, handles: Any, names: list[str], **options: Any) -> Any:
        labels.extend(names)
        return original(self, handles, names, **options)

    monkeypatch.setattr(text_report.plt.Figure, "legend", legend)
    ddp, diloco = run(text_report, "ddp", 30), run(text_report, "diloco", 30)
    few = run(text_report, "ddp", 4)
    few.seconds = [2.0, 4.0, 6.0, 8.0]
    few.waited = [1.0, 2.0, 3.0, 4.0]
    ddp.extrapolate(few)
    assert ddp.seconds == [2.0 * step for step in range(1, 31)]
    assert ddp.waited[-1] == pytest.approx(30.0)
    text_report.write([ddp, diloco], tmp_path, "a title", {"steps": 30})
    table = capsys.readouterr().out
    assert "extrapolated from 4 measured steps" in table
    assert "≈ 60 s" in table
    assert "≈ 0 s" not in table
    assert labels == ["ddp (extrapolated from 4 steps)", "diloco"]
    numbers = json.loads((tmp_path / "train_text.json").read_text())
    assert [one["measured_steps"] for one in numbers["runs"]] == [4, None]
    assert numbers["runs"][1]["validation"][-1] == {"step": 30, "loss": pytest.approx(4 / 30)}
    assert numbers["runs"][1]["seconds_per_step"] == pytest.approx(0.01)
    assert (tmp_path / "train_text.png").read_bytes().startswith(b"\x89PNG")


def test_measured_times_are_not_marked(
    text_report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text_report.write([run(text_report, "ddp", 30)], tmp_path, "a title", {})
    assert "extrapolated" not in capsys.readouterr().out


def test_bytes_of_evaluations_do_not_count(text_report: ModuleType) -> None:
    result = text_report.report.Run("diloco", MODEL, 3, rank=1, ranks=2)
    sent = [SimpleNamespace(bytes_sent=count, wait_seconds=0.0) for count in (10, 110, 120, 220, 230)]
    result.step(1.0, 1, sent[0])
    result.evaluation(1.0, sent[1])
    result.step(1.0, 1, sent[2])
    result.evaluation(1.0, sent[3])
    result.step(1.0, 1, sent[4])
    assert result.bytes_sent == [10, 20, 30]


def test_a_character_depends_on_none_that_follows() -> None:
    torch.manual_seed(0)
    model = Transformer(symbols=11, width=8, layers=2, heads=2, context=6).eval()
    x = torch.randint(11, (3, 6))
    changed = x.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    before, after = model(x), model(changed)
    assert before.shape == (3, 11, 6)
    assert torch.equal(before[:, :, :4], after[:, :, :4])
    assert not torch.allclose(before[:, :, 4], after[:, :, 4])
    # Shorter windows are fine, too.
    torch.testing.assert_close(model(x[:, :4]), before[:, :, :4])
