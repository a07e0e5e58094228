"""Without Numba the package trains, through NumPy, and gives the bits of compiled kernels."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels import knobs
from tests.grids import grid

ROOT = Path(__file__).parents[1]
HIDDEN = ("numba", "llvmlite")
PATIENCE = 300  # seconds; a busy machine takes minutes to import PyTorch

pytestmark = pytest.mark.timeout(2 * PATIENCE)


class Hiding(MetaPathFinder):
    """Another finder, which does not find the hidden packages."""

    def __init__(self, finder: Any) -> None:
        self.finder = finder

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        found: ModuleSpec | None = self.finder.find_spec(name, path, target)
        return None if name.partition(".")[0] in HIDDEN else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def deep() -> nn.Module:
    """More parameters than those of which an optimizer asks PyTorch one by one."""
    return nn.Sequential(nn.Linear(7, 5), *(nn.Linear(5, 5) for _ in range(40)))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 61), nn.Tanh(), nn.Linear(61, 13))


def train(wrap: Callable[..., Any], make: Callable[[], nn.Module] = wide, own_steps: bool = True) -> list[torch.Tensor]:
    """The parameters of both ranks after a few steps.

    Args:
        wrap: gives the algorithm and the optimizer of a module.
        make: gives the module.
        own_steps: False if the algorithm takes the steps.
    """
    from bagua_kernels.comm import Communicator, run_ranks

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        module, generator = make(), torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.4)
        algorithm, optimizer = wrap(module, communicator)
        generator.manual_seed(communicator.rank)
        for _ in range(4):
            algorithm(torch.randn(3, 7, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in module.parameters()]

    return [p for parameters in run_ranks(2, rank, timeout=100.0) for p in parameters]


def algorithm(spec: str, optimizer: str = "SGD", **options: Any) -> list[torch.Tensor]:
    from bagua_kernels import optim
    from bagua_kernels.algorithms import from_spec

    def wrap(module: nn.Module, communicator: Any) -> tuple[Any, Any]:
        steps = getattr(optim, optimizer)(module.parameters(), lr=0.05) if optimizer else None
        wrapped = from_spec(spec, module, steps, communicator=communicator, **options)
        return wrapped, steps or wrapped.optimizer

    return train(wrap)


def fused(dtype: torch.dtype) -> list[torch.Tensor]:
    from bagua_kernels import optim
    from bagua_kernels.algorithms import GradientAllReduce

    def wrap(module: nn.Module, communicator: Any) -> tuple[Any, Any]:
        steps = optim.AdamW(module.parameters(), lr=0.01)
        wrapped = GradientAllReduce(module, communicator=communicator)
        return lambda x: wrapped(x.to(dtype)).float(), steps

    return train(wrap, lambda: deep().to(dtype))


TRAININGS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "bytegrad": lambda: algorithm("bytegrad"),
    "bytegrad_in_backward": lambda: algorithm("bytegrad:stochastic=True", "AdamW", apply_in_backward=True),
    "powersgd": lambda: algorithm("powersgd:rank=2,min_compression=0.5"),
    "qadam": lambda: algorithm("qadam:freeze_step=2", ""),
    "topk": lambda: algorithm("topk:ratio=0.1", min_numel=0, exact=()),
    "lowprec": lambda: algorithm("lowprec"),
    "adamw": lambda: fused(torch.float32),
    "adamw_bfloat16": lambda: fused(torch.bfloat16),
    "adamw_float64": lambda: fused(torch.float64),
}


def save_trained(path: str) -> None:
    """Trains all of them in this process, which has no Numba, and saves the parameters."""
    import bagua_kernels.algorithms
    import bagua_kernels.comm
    import bagua_kernels.compression
    import bagua_kernels.optim
    import bagua_kernels.warmup  # noqa: F401

    for package in HIDDEN:
        assert importlib.util.find_spec(package) is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(package)
    torch.save({name: run() for name, run in TRAININGS.items()}, path)
    assert not {name.partition(".")[0] for name in sys.modules} & set(HIDDEN)
    for launcher in ("multitensor", "blockwise", "blockwise.fusion", "select"):
        assert f"bagua_kernels.launchers.{launcher}._numpy" in sys.modules


@pytest.fixture(scope="module")
def without_numba(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[torch.Tensor]], str]:
    """The parameters of all trainings in a process without Numba, and what it logged."""
    file = tmp_path_factory.mktemp("without_numba") / "parameters.pt"
    program = (
        "import sys\n"
        "from tests.test_without_numba import Hiding, save_trained\n"
        "sys.meta_path[:] = map(Hiding, sys.meta_path)\n"
        f"save_trained({str(file)!r})\n"
    )
    options: Any = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": PATIENCE, "check": False}
    environment = {**os.environ, knobs.BACKEND.variable: "auto", knobs.RANK.variable: ""}
    result = subprocess.run([sys.executable, "-c", program], env=environment, **options)
    assert result.returncode == 0, result.stderr
    return torch.load(file), result.stderr


@grid(name=list(TRAININGS))
def test_training_is_that_of_compiled_kernels(without_numba: Any, name: str) -> None:
    with knobs.override(knobs.BACKEND, "numba_cpu"):
        found, expected = without_numba[0][name], TRAININGS[name]()
    for own, other in zip(found, expected, strict=True):
        if name == "powersgd":
            # Products with a rank's own gradient are summed in any order.
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(own, other)


def test_numba_is_missed_once_in_the_log(without_numba: Any) -> None:
    log = without_numba[1]
    assert log.count("because numba_cpu needs the package 'numba': pip install numba") == 1
    assert log.count("many times as slow as compiled kernels") == 1
