"""The stand-in for CuPy's NCCL, and the calls of the binding, are those of the real CuPy, which can be imported without a GPU."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua_kernels.comm import ReduceOp
from bagua_kernels.comm.backends.nccl import binding
from bagua_kernels.comm.backends.nccl.binding import Endpoint
from tests import limits
from tests.comm.backends.nccl import fake_nccl

ROOT = Path(__file__).parents[4]
OVERLAY = ROOT / ".overlay" / "nccl"
STREAM = 99


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    """What the program `real_nccl.py` prints, for which CuPy is on its path."""
    environment = dict(os.environ)
    if OVERLAY.exists():
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(OVERLAY), environment.get("PYTHONPATH", "")]))
    elif importlib.util.find_spec("cupy") is None:
        pytest.skip("there is no CuPy here, nor in .overlay/nccl: run `make overlay`")
    command = [sys.executable, "-m", "tests.comm.backends.nccl.real_nccl"]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limits.seconds(100)
    )
    assert result.returncode == 0, result.stderr
    facts: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return facts


def names(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_stand_in_has_the_real_constants_and_statuses(real: dict[str, Any]) -> None:
    constants = {name: value for name, value in real["constants"].items() if name in fake_nccl.CONSTANTS}
    assert constants == fake_nccl.CONSTANTS
    nameless = [status for status, told in enumerate(real["statuses"]) if told == f"KeyError: {status}"]
    assert nameless == list(range(fake_nccl.NAMELESS, len(real["statuses"])))


def test_stand_in_takes_the_real_arguments(real: dict[str, Any]) -> None:
    """By number, order and name."""
    public = [name for name in vars(fake_nccl.NcclCommunicator) if not name.startswith("_")]
    found = {name: names(getattr(fake_nccl.NcclCommunicator, name)) for name in public}
    assert found == real["arguments"]
    assert {name: names(getattr(fake_nccl.Gpu, name)) for name in real["functions"]} == real["functions"]
    required = names(fake_nccl.Gpu.NcclCommunicator)
    assert real["made_with"] == [*required, "config"]


def test_ids_are_those_of_the_stand_in(real: dict[str, Any]) -> None:
    made = fake_nccl.World(1).gpus[0].get_unique_id()
    assert real["unique_id"] == [type(made).__name__, len(made)]
    assert real["connect"] == "ValueError: commId length 127 != 128."


def test_binding_finds_the_real_nccl(real: dict[str, Any]) -> None:
    assert real["unavailable"] == ""
    assert real["version"] >= binding.OLDEST
    for name in (*binding._DTYPES.values(), *binding._OPS.values()):
        assert real["constants"][name] == fake_nccl.CONSTANTS[name]
    assert {"non_blocking", "priority"} <= set(real["stream"])
    assert real["stream_pointer"] == "0"


def test_real_binding_accepts_each_call(real: dict[str, Any]) -> None:
    """A call with wrong arguments would be a `TypeError`; NCCL itself refuses the communicator that is none."""
    public = {name for name, value in vars(Endpoint).items() if inspect.isfunction(value) and name[0] != "_"}
    assert public == {name.removesuffix("_inputs") for name in real["calls"]}
    refused = "RuntimeError: NCCL_ERROR_INVALID_ARGUMENT: invalid argument (run with NCCL_DEBUG=WARN for details)"
    assert real["calls"] == {name: "None" if name in ("abort", "destroy") else refused for name in real["calls"]}
    assert real["group"] == "(None, None)"


class Recorder:
    """A communicator of NCCL that keeps the arguments of each call, by the names that CuPy has for them."""

    def __init__(self, arguments: dict[str, list[str]]) -> None:
        self._arguments = arguments
        self.calls: list[tuple[str, dict[str, int]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self.calls.append((name, dict(zip(self._arguments[name], values, strict=True))))


def test_arguments_mean_what_cupy_calls_them(real: dict[str, Any]) -> None:
    gpu = fake_nccl.World(1).gpus[0]
    native, runtime = Recorder(real["arguments"]), SimpleNamespace(nccl=gpu)
    endpoint = Endpoint(runtime, native, SimpleNamespace(cuda_stream=STREAM))
    x, y = torch.ones(3, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    endpoint.all_reduce(x, ReduceOp.MIN)
    endpoint.reduce(x, ReduceOp.PRODUCT, 5, receives=True)
    endpoint.reduce(x, ReduceOp.PRODUCT, 5, receives=False)
    endpoint.reduce_scatter(x, y, ReduceOp.MAX)
    endpoint.broadcast(x, 5)
    endpoint.all_gather(y, x)
    endpoint.exchange({5: [x]}, {6: [y]})
    a, b, stream = x.data_ptr(), y.data_ptr(), STREAM
    assert native.calls == [
        ("allReduce", {"sendbuf": a, "recvbuf": a, "count": 3, "datatype": 8, "op": 3, "stream": stream}),
        ("reduce", {"sendbuf": a, "recvbuf": a, "count": 3, "datatype": 8, "op": 1, "root": 5, "stream": stream}),
        ("reduce", {"sendbuf": a, "recvbuf": 0, "count": 3, "datatype": 8, "op": 1, "root": 5, "stream": stream}),
        ("reduceScatter", {"sendbuf": b, "recvbuf": a, "recvcount": 3, "datatype": 8, "op": 2, "stream": stream}),
        ("broadcast", {"sendbuff": a, "recvbuff": a, "count": 24, "datatype": 1, "root": 5, "stream": stream}),
        ("allGather", {"sendbuf": a, "recvbuf": b, "count": 24, "datatype": 1, "stream": stream}),
        ("send", {"sendbuf": b, "count": 48, "datatype": 1, "peer": 6, "stream": stream}),
        ("recv", {"recvbuf": a, "count": 24, "datatype": 1, "peer": 5, "stream": stream}),
    ]
