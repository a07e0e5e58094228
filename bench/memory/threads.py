"""Peak memory of two ranks that are threads of one process: small models, for tests."""

from __future__ import annotations

import gc
import json
import threading
from typing import Any

import torch

from bagua_kernels.comm import Communicator, run_ranks
from bench.memory.model import Model, step_of, wrap
from bench.memory.rank import exactly, mark, resident

_RANKS = 2


def grown(spec: str, scale: float, steps: int) -> int:
    """Returns the bytes by which the peak of one rank grew in training, models and all; see `rank.measure`."""
    meet = threading.Barrier(_RANKS)

    def rank(communicator: Communicator) -> int:
        torch.manual_seed(0)
        if meet.wait() == 0:
            before.append(mark())
        meet.wait()
        model, optimizer = wrap(spec, Model(scale), communicator)
        step = step_of(model, optimizer)
        for number in range(steps):
            step(number)
            meet.wait()  # so that both peaks are there at a time
        getattr(model, "wait", lambda: None)()
        meet.wait()
        peak = resident("VmHWM")
        getattr(model, "close", lambda: None)()
        return peak

    before: list[int] = []
    peaks = run_ranks(_RANKS, rank, timeout=120.0)
    gc.collect()
    return (max(peaks) - before[0]) // _RANKS


def main(specs: dict[str, str], scale: float, steps: int) -> None:
    """Prints the bytes beyond the plain loop's for each spec."""
    exactly()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, spec in {"plain": "plain", **specs}.items():
        grown(spec, 1e-4, steps)
        found[name] = grown(spec, scale, steps)
    model = Model(scale)
    found["parameters"] = sum(p.numel() for p in model.parameters())
    found["largest"] = max(p.numel() for p in model.parameters())
    print("RESULT", json.dumps(found), flush=True)
