"""`python -m bagua_kernels.warmup`: what it has compiled, training finds."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bagua_kernels import comm, knobs, optim, warmup
from bagua_kernels.algorithms import from_spec, names
from bagua_kernels.comm.testing import run_processes
from bagua_kernels.jit import op
from bagua_kernels.warmup import main, warm_up
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


def test_all_algorithms_by_default(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets an optimizer that it takes; on the NumPy backend, that this test need not compile them all."""
    monkeypatch.setattr(op, "compiles_for_cpu", lambda: True)
    # A smaller model, and one step: about 30 algorithms, each with ranks of its own, take seconds anyway.
    for name, value in (("_INPUTS", 8), ("_HIDDEN", 16), ("_STEPS", 1)):
        monkeypatch.setattr(warmup, name, value)
    with knobs.override(knobs.BACKEND, "numpy"):
        assert main(["--optimizers", "SGD"]) == 0
    said = capsys.readouterr().err
    assert all(f"{name}: " in said for name in names() if name != "mu_loco" or hasattr(optim, "Muon"))
    assert "the next start finds the kernels on disk" in said


def test_one_that_fails_leaves_the_others(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(spec: str, **_: object) -> float:
        if spec == "allreduce":
            raise TypeError("it takes\nno such optimizer")
        return 0.0

    monkeypatch.setattr(op, "compiles_for_cpu", lambda: True)
    monkeypatch.setattr(warmup, "warm_up", refuses)
    assert main(["allreduce", "bytegrad"]) == 1
    said = capsys.readouterr().err
    assert "allreduce cannot be run: it takes" in said
    assert "bytegrad: 0.0 s" in said
    assert "without all kernels of allreduce" in said


def test_nothing_is_compiled_for_numpy(capsys: pytest.CaptureFixture[str]) -> None:
    with knobs.override(knobs.BACKEND, "numpy"):
        assert main(["bytegrad"]) == 0
    said = capsys.readouterr().err
    assert "nothing is compiled" in said
    assert "on disk" not in said


def test_what_is_no_optimizer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["allreduce", "--optimizers", "Extras"])
    assert ended.value.code == 2
    assert "there is no Extras among" in capsys.readouterr().err


@pytest.mark.parametrize("spec", ["allreduce", "d2"])
def test_threads_are_as_before(spec: str) -> None:
    before = torch.get_num_threads()
    assert warm_up(spec, optimizers=["SGD"]) >= 0.0
    assert torch.get_num_threads() == before
