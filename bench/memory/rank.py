"""One rank of the memory benchmark: trains in a process of its own, and prints how far its memory grew."""

from __future__ import annotations

import ctypes
import gc
import json
import re
import time
from pathlib import Path
from typing import Any

import torch

from bagua_kernels import comm
from bagua_kernels.algorithms import Algorithm
from bench.memory.model import Model, step_of, wrap

_PR_SET_THP_DISABLE = 41
_M_MMAP_THRESHOLD = -3
_MAPPED = 1 << 16  # bytes from which an allocation has pages of its own, which go back when it is freed


def exactly() -> None:
    """Makes the resident set of this process follow its allocations; called before the first large one."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED)


def resident(field: str) -> int:
    """Returns bytes from the kernel's record of this process: "VmRSS", or "VmHWM", the most since `mark`."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def mark() -> int:
    """Begins a new maximum, and returns the bytes that are resident now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def measure(spec: str, scale: float, steps: int) -> dict[str, Any]:
    """Trains, and returns bytes: parameters, and by how much memory grew in parts of the run.

    Args:
        spec: as for `wrap`.
        scale: as for `Model`.
        steps: of training.
    """
    # Imports, threads and compiled kernels are those of the program, whatever the model.
    _train(spec, 1e-4, steps)
    before = mark()
    return _train(spec, scale, steps, before)


def _train(spec: str, scale: float, steps: int, before: int = 0) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Model(scale)
    parameters = sum(p.numel() for p in module.parameters())
    mark()
    model, optimizer = wrap(spec, module)
    wrapping = resident("VmHWM") - before
    mark()
    step = step_of(model, optimizer)
    for number in range(steps):
        step(number)
        if spec.startswith(("async", "wagma")):
            time.sleep(0.2)  # averages run beside training
    peak = resident("VmHWM") - before
    found = {"parameters": parameters, "largest": max(p.numel() for p in module.parameters())}
    found |= {"wrapping": wrapping, "training": peak}
    if isinstance(model, Algorithm):
        getattr(model, "wait", lambda: None)()
        rest = mark()
        state = model.algorithm_state_dict()
        found["state"] = resident("VmHWM") - rest
        del state
        model.close()
    return found


def main(spec: str, scale: float, steps: int) -> None:
    """Prints what `measure` found."""
    exactly()
    torch.set_num_threads(1)
    if spec == "ddp":
        torch.distributed.init_process_group("gloo")
    elif spec != "plain":
        comm.init()
    print("RESULT", json.dumps(measure(spec, scale, steps)), flush=True)
    if spec == "ddp":
        torch.distributed.destroy_process_group()
    elif spec != "plain":
        comm.shutdown()
