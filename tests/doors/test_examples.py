"""The examples of doors, and the code on their page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.doors.jobs import needs, outside

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "doors").glob("*.py"))
MOST_LINES = 60
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# Lightning starts its ranks itself.
OWN = {"lightning_trainer.py", "fabric_loop.py"}


@needs("lightning", "accelerate", "transformers", "ray")
@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [one.name for one in EXAMPLES])
def test_example_learns(name: str, installed: Path, tmp_path: Path) -> None:
    """As its user starts it who has copied it, and has installed the wheel."""
    shutil.copy2(ROOT / "examples" / "doors" / name, tmp_path)
    launcher = () if name in OWN or name.startswith("ray") else RANKS
    command = [installed / "python", *launcher, name]
    # Ray starts its processes slowly where there are two cores.
    run = outside(
        command, tmp_path, 280 if name.startswith("ray") else 110, RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="200"
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = re.search(r"loss (\d+\.\d+)", run.stdout)
    assert found is not None, run.stdout[-2000:]
    assert float(found[1]) < 1.3


def test_examples_are_short() -> None:
    """Each can be read at one look."""
    assert len(EXAMPLES) >= 4
    assert {
        one.name: len(one.read_text().splitlines())
        for one in EXAMPLES
        if len(one.read_text().splitlines()) > MOST_LINES
    } == {}


def test_code_of_the_page_compiles() -> None:
    """What it imports is there."""
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "frameworks.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) >= 5
    for block in blocks:
        compile(block, "frameworks.md", "exec")
