"""What stands between the communicator and CuPy."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua_kernels.comm import ReduceOp
from bagua_kernels.comm.backends.nccl import binding as nccl_binding
from bagua_kernels.comm.backends.nccl.binding import Endpoint
from bagua_kernels.errors import BackendUnavailableError
from tests.comm.backends.nccl.fake_nccl import World


def test_the_reason_for_which_it_is_unavailable_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert nccl_binding.unavailable() == "torch.cuda.is_available() is False"
    with pytest.raises(BackendUnavailableError, match=r"torch\.cuda\.is_available"):
        nccl_binding.load()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    assert "cupy cannot be imported" in nccl_binding.unavailable()
    cuda = types.ModuleType("cupy.cuda")
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    cuda.nccl = types.SimpleNamespace()
    assert "available is False: install nvidia-nccl" in nccl_binding.unavailable()
    cuda.nccl = types.SimpleNamespace(available=True, get_version=lambda: 2708)
    assert "get_version() is 2708" in nccl_binding.unavailable()
    cuda.nccl = types.SimpleNamespace(available=True, get_version=lambda: 22700)
    assert nccl_binding.load().nccl is cuda.nccl


def test_ids_become_what_either_cupy_takes() -> None:
    class Old:
        def get_unique_id(self) -> tuple[int, ...]:
            return (-128, -1, 0, 127)

        def NcclCommunicator(self, size: int, unique_id: Any, rank: int) -> Any:
            if not isinstance(unique_id, tuple):
                raise TypeError("expected tuple, got bytes")
            return unique_id

    runtime = nccl_binding.Runtime(Old(), None, lambda tensor, stream: None, lambda: None, lambda device: None)
    assert runtime.unique_id() == b"\x80\xff\x00\x7f"
    assert runtime.connect(2, runtime.unique_id(), 0) == (-128, -1, 0, 127)


def test_a_call_that_does_not_return_is_left_and_one_that_raises_raises() -> None:
    runtime, device = World(1).runtime(0), torch.device("cpu")
    blocker = threading.Event()
    assert not runtime.bounded(lambda: blocker.wait(10) and None, device, 0.05)
    blocker.set()
    assert runtime.bounded(lambda: None, device, 10)
    with pytest.raises(ZeroDivisionError):
        runtime.bounded(lambda: 1 / 0, device, 10)


def test_an_endpoint_that_was_given_up_says_so() -> None:
    world = World(1)
    runtime = world.runtime(0)
    runtime.cuda.set_device(torch.device("cpu"))
    stream = runtime.cuda.Stream(torch.device("cpu"))
    endpoint = Endpoint(runtime, runtime.connect(1, runtime.unique_id(), 0), stream)
    endpoint.abort()
    endpoint.abort()
    endpoint.destroy()
    endpoint.check()
    with pytest.raises(RuntimeError, match="given up"):
        endpoint.all_reduce(torch.ones(1), ReduceOp.SUM)


def test_a_status_without_a_name_is_an_error() -> None:
    class Native:
        def broadcast(self, *arguments: int) -> None:
            raise KeyError(7)

    runtime = World(1).runtime(0)
    endpoint = Endpoint(runtime, Native(), runtime.cuda.Stream(torch.device("cpu")))
    with pytest.raises(RuntimeError, match="status 7"):
        endpoint.broadcast(torch.ones(1), 0)


def test_nothing_stays_in_a_group_when_a_send_fails() -> None:
    world = World(1)
    runtime = world.runtime(0)

    class Native:
        def send(self, *arguments: int) -> None:
            raise RuntimeError("no")

    endpoint = Endpoint(runtime, Native(), runtime.cuda.Stream(torch.device("cpu")))
    with pytest.raises(RuntimeError, match="no"):
        endpoint.exchange({}, {0: [torch.ones(1)]})
    assert world.gpus[0].group is None


@pytest.mark.slow
def test_import_does_not_load_cupy() -> None:
    program = "import sys, bagua_kernels.comm.backends.nccl.communicator; assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[4], check=True, timeout=60)
