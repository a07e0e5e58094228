"""`python -m bagua_kernels.warmup`: what it has compiled, training finds."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bagua_kernels import comm, optim
from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm.testing import run_processes
from bagua_kernels.warmup import warm_up
from tests import limits
from tests.grids import only

ROOT = Path(__file__).parents[1]


def run(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bagua_kernels.warmup", *arguments]
    variables = {"NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT), "PATH": ""}
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=limits.seconds(110), check=False
    )


def train(spec: str) -> None:
    """Trains another model than the command's."""
    comm.init(timeout=limits.seconds(60))
    torch.set_num_threads(1 + comm.rank())
    module = torch.nn.Sequential(torch.nn.Linear(77, 1000), torch.nn.Linear(1000, 3))
    optimizer = optim.AdamW(module.parameters())
    model = from_spec(spec, module, optimizer)
    for _ in range(3):
        model(torch.ones(2, 77)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    comm.shutdown()


def kernels(folder: Path) -> set[Path]:
    """The kernels that have been compiled into a folder."""
    return set(folder.rglob("*.nbc"))


@pytest.mark.slow
def test_training_compiles_nothing_after_it(tmp_path: Path) -> None:
    result = run("bytegrad", "--optimizers", "AdamW", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    compiled = kernels(tmp_path)
    assert compiled
    results = run_processes(
        train, 2, args=("bytegrad",), env={"NUMBA_CACHE_DIR": str(tmp_path)}, timeout=limits.seconds(100)
    )
    assert [r.returncode for r in results] == [0, 0], results
    assert kernels(tmp_path) == compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "text"),
    only(
        [(["nonsense"], "no algorithm 'nonsense'"), (["allreduce", "--optimizers", "Adom"], "no Adom")],
        (["allreduce", "--optimizers", "Adom"], "no Adom"),
    ),
)
def test_unknown_names_are_told(arguments: list[str], text: str, tmp_path: Path) -> None:
    result = run(*arguments, folder=tmp_path)
    assert result.returncode == 2
    assert text in result.stderr


@pytest.mark.parametrize("spec", ["allreduce", "d2"])
def test_threads_are_as_before(spec: str) -> None:
    before = torch.get_num_threads()
    assert warm_up(spec, optimizers=["SGD"]) >= 0.0
    assert torch.get_num_threads() == before
