"""mypy's plugin finds each place where the host may wait for a GPU, unless the place has a reason."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mypy", reason="needs mypy")

from tests import limits
from tests.mypy_waits import reasoned

ROOT = Path(__file__).parents[1]
SNIPPET = """
import torch

x = torch.ones(3)
device = torch.device("cpu")
x.item()
x.tolist()
x.cpu()
x.nonzero()
float(x)
int(x)
bool(x)
x.to(device)
x.to("cuda:0")
torch.tensor([1.0], device=device)
torch.amp.GradScaler("cpu").get_scale()
# Not one of these waits.
x.to(torch.float64)
x.to(device, non_blocking=True)
float("3")
int(len(x))
x.double()
torch.tensor([1.0])
torch.tensor([1.0], device="cpu")
# waits: a test.
x.item()
torch.stack([
    x,
    # waits: a test.
    x.cpu(),
])
"""


@pytest.mark.slow
def test_the_plugin_finds_waits_without_a_reason(tmp_path: Path) -> None:
    program = tmp_path / "snippet.py"
    program.write_text(SNIPPET)
    settings = tmp_path / "mypy.ini"
    settings.write_text(f"[mypy]\nplugins = {ROOT / 'tests' / 'mypy_waits.py'}\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), str(program)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=limits.seconds(600), check=False
    )
    found = [int(line) for line in re.findall(r"snippet\.py:(\d+): error: .* may wait for a GPU", done.stdout)]
    lines = SNIPPET.splitlines()
    first, last = lines.index("x.item()") + 1, lines.index('torch.amp.GradScaler("cpu").get_scale()') + 1
    assert found == list(range(first, last + 1)), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "line", "known"),
    [
        ("# waits: once.\nx.item()\n", 2, True),
        ("x.item()\n", 1, False),
        ("# waits: once.\ny = 1\nx.item()\n", 3, False),
        ("# waits: once.\n# And more.\nx.item()\n", 3, True),
        ("# waits: once.\nf(\n    x.item()\n)\n", 3, True),
        ("# waits:\nx.item()\n", 2, False),
    ],
)
def test_a_reason_belongs_to_its_statement(text: str, line: int, known: bool, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(text)
    assert reasoned(str(program), SimpleNamespace(line=line)) is known
