"""A program that prints, as JSON, what the real CuPy says of its NCCL; it needs no GPU.

It runs in a process of its own: `get_unique_id` opens a socket and starts a thread, and CuPy may come from a folder that only
this process has on its path.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from cupy.cuda import Stream, nccl

from bagua_kernels.comm import ReduceOp
from bagua_kernels.comm.backends.nccl import binding

METHODS = ("allGather", "allReduce", "broadcast", "recv", "reduce", "reduceScatter", "send")
METHODS += ("abort", "check_async_error", "destroy")


def signature(function: Any) -> list[str]:
    """The names of the arguments that a function of Cython takes; its docstring begins with them."""
    arguments = function.__doc__.splitlines()[0].partition("(")[2].rpartition(")")[0].split(",")
    return [part.split("=")[0].split()[-1] for part in arguments if part.strip() not in ("", "self")]


def outcome(call: Callable[[], Any]) -> str:
    """What a call returns or raises."""
    try:
        return repr(call())
    except Exception as error:
        kind = "RuntimeError" if isinstance(error, RuntimeError) else type(error).__name__
        return f"{kind}: {error}"


def calls(endpoint: binding.Endpoint) -> dict[str, Callable[[], None]]:
    """A call of each method of an endpoint that gets to NCCL."""
    x, y = torch.ones(4), torch.ones(8)
    return {
        "all_reduce": lambda: endpoint.all_reduce(x, ReduceOp.SUM),
        "reduce": lambda: endpoint.reduce(x, ReduceOp.MAX, 1, receives=True),
        "reduce_scatter": lambda: endpoint.reduce_scatter(x, y, ReduceOp.SUM),
        "broadcast": lambda: endpoint.broadcast(x, 1),
        "all_gather": lambda: endpoint.all_gather(y, x),
        "exchange": lambda: endpoint.exchange({1: [x]}, {}),
        "exchange_inputs": lambda: endpoint.exchange({}, {1: [x]}),
        "check": endpoint.check,
        "abort": endpoint.abort,
        "destroy": endpoint.destroy,
    }


def facts() -> dict[str, Any]:
    torch.cuda.is_available = lambda: True
    reason, runtime = binding.unavailable(), binding.load()
    # It has no communicator of NCCL, which NCCL notices once the binding has accepted the arguments.
    empty = lambda: nccl.NcclCommunicator.__new__(nccl.NcclCommunicator)  # noqa: E731
    endpoint = lambda: binding.Endpoint(runtime, empty(), SimpleNamespace(cuda_stream=0))  # noqa: E731
    unique_id = runtime.unique_id()
    return {
        "unavailable": reason,
        "version": nccl.get_version(),
        "constants": {name: getattr(nccl, name) for name in dir(nccl) if name.startswith("NCCL_")},
        "arguments": {name: signature(getattr(nccl.NcclCommunicator, name)) for name in METHODS},
        "functions": {name: signature(getattr(nccl, name)) for name in ("get_unique_id", "groupStart", "groupEnd")},
        "made_with": signature(nccl.NcclCommunicator),
        "unique_id": [type(unique_id).__name__, len(unique_id)],
        "statuses": [outcome(lambda status=status: nccl.check_status(status)) for status in range(9)],
        "calls": {name: outcome(calls(endpoint())[name]) for name in calls(endpoint())},
        "group": outcome(lambda: (nccl.groupStart(), nccl.groupEnd())),
        "connect": outcome(lambda: runtime.connect(2, unique_id[:-1], 0)),
        "stream": list(inspect.signature(Stream).parameters),
        "stream_pointer": outcome(lambda: Stream.null.ptr),
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
