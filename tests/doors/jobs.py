"""What jobs of two ranks do in the loops of other libraries: a small model, its data, and what is left at the end."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.comm.testing import ProcessResult, run_processes
from tests import limits

SPECS = {
    "hook": ("bytegrad:block=64", True),
    "bytegrad": ("bytegrad:block=64", False),
    "diloco": ("diloco:interval=4", False),
}
LIMIT = limits.seconds(100)
GROUPS: list[Any] = []
# What is imported here is imported in the servers whose copies ranks are.
for _door in ("accelerate", "transformers", "lightning", "fabric"):
    if importlib.util.find_spec("lightning" if _door == "fabric" else _door) is not None:
        importlib.import_module("torch._dynamo")
        importlib.import_module(f"bagua_kernels.integrations.{_door}")


def needs(*names: str) -> pytest.MarkDecorator:
    """Leaves out tests whose library is not installed, as in the environment of the other tests: `make test-doors` has them."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed; run make test-doors")


def job(target: Callable[..., object], size: int, *args: Any, env: dict[str, str] | None = None) -> list[Any]:
    """Returns what each rank reported; an error of one rank is that of the test."""
    results = run_processes(target, size, args=args, timeout=LIMIT, env=env)
    assert all(map(has_ended, results)), "\n".join(one.stderr[-3000:] for one in results)
    return [[json.loads(line[7:]) for line in one.stdout.splitlines() if line.startswith("REPORT ")] for one in results]


def has_ended(one: ProcessResult) -> bool:
    """Returns whether a rank ended without an error.

    PyTorch 2.13 aborts a process now and then that reported all it had: a thread of Gloo frees what the last collective kept,
    and takes the interpreter's lock for that while the interpreter ends. Two ranks that end after an all-reduce do so, too.
    """
    aborted = one.returncode == -signal.SIGABRT and one.stderr.endswith(
        "terminate called without an active exception\n"
    )
    return one.returncode == 0 or (aborted and "REPORT " in one.stdout)


def outside(
    words: Sequence[str | Path], folder: Path, seconds: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program in a folder, from which nothing of the repository can be imported."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    command, limit = [str(word) for word in words], limits.seconds(seconds)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit, check=False
    )


def report(value: Any) -> None:
    """Hands a value to the test; called by a rank."""
    print("REPORT", json.dumps(value), flush=True)


class Net(torch.nn.Module):
    """Has a layer that no loss uses, as many models have."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = torch.nn.Linear(12, 40), torch.nn.Linear(40, 3)
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.computed_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        self.computed_in = str(hidden.dtype)
        return self.last(torch.tanh(hidden)) * self.scale


def samples(count: int = 384) -> torch.utils.data.TensorDataset:
    """A task that the network learns: classes of points by their nearest of three centres."""
    generator = torch.Generator().manual_seed(7)
    x, centres = torch.randn(count, 12, generator=generator), torch.randn(3, 12, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.cdist(x, centres).argmin(1))


def digest(module: torch.nn.Module) -> str:
    """Returns a text that is equal for equal bits of all parameters."""
    found = hashlib.sha256()
    for name, parameter in sorted(module.state_dict().items()):
        found.update(name.encode())
        found.update(parameter.detach().contiguous().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def loss_of(module: torch.nn.Module) -> float:
    """Returns the loss over all samples."""
    x, y = samples().tensors
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(module(x), y))


def keep_group() -> None:
    """Keeps the process group as long as the process.

    Else the last reference may be that of DDP, which joins Gloo's threads when it is freed, with the interpreter's lock held.
    One of them may wait for that lock, to forget the context of a backward pass that has just ended.
    """
    GROUPS.append(torch.distributed.group.WORLD)


def left_behind() -> list[str]:
    """Returns the threads and sockets of this package that are still there."""
    threads = [one.name for one in threading.enumerate() if "bagua_kernels" in one.name]
    return threads + (["a communicator"] if comm.is_initialized() else [])
