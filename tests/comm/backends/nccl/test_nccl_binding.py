"""What stands between the communicator and CuPy."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

from bagua_kernels.comm import ReduceOp
from bagua_kernels.comm.backends.nccl import binding as nccl_binding
from bagua_kernels.comm.backends.nccl.binding import Endpoint
from bagua_kernels.errors import BackendUnavailableError
from tests import limits
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
    cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
    cupy.__version__ = "14.2.0"
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    cuda.nccl = types.SimpleNamespace()
    assert "available is False: install nvidia-nccl" in nccl_binding.unavailable()
    cuda.nccl = types.SimpleNamespace(available=True, get_version=lambda: 2708)
    assert "get_version() is 2708" in nccl_binding.unavailable()
    cuda.nccl = types.SimpleNamespace(available=True, get_version=lambda: 22700)
    assert nccl_binding.load().nccl is cuda.nccl


@pytest.mark.parametrize(
    ("version", "fine"), [("13.6.0", False), ("9.1", False), ("14.0.0rc1", True), ("15.1.0", True)]
)
def test_old_cupy_is_refused(monkeypatch: pytest.MonkeyPatch, version: str, fine: bool) -> None:
    """Before version 14 the calls that wait for other ranks hold the interpreter's lock."""
    cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
    cupy.__version__ = version
    cuda.nccl = types.SimpleNamespace(available=True, get_version=lambda: 22700)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    if fine:
        assert nccl_binding.unavailable() == ""
        return
    text = rf"cupy\.__version__ is {version}, expected at least 14: install cupy-cuda13x>=14"
    with pytest.raises(BackendUnavailableError, match=text):
        nccl_binding.load()


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
    subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[4], check=True, timeout=limits.seconds(60)
    )
