"""Couriers compile nothing: what they call of a codec has been called before, on the thread that trains."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import AsyncDecentralized, AsyncModelAverage, DiLoCo
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import from_spec
from tests import limits
from tests.algorithms.ranks import batch

CASES: dict[str, Any] = {
    "pairs": (AsyncDecentralized, {"codec": "minmax_uint8:block=64"}),
    "pairs, sparse": (AsyncDecentralized, {"codec": "topk:ratio=0.1"}),
    "all": (AsyncModelAverage, {"codec": "minmax_uint4:block=64", "interval": 1, "warmup_steps": 1}),
    "quorum": (DiLoCo, {"codec": "minmax_uint8:block=64", "min_numel": 0, "quorum": 1, "grace": 0.0, "interval": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_courier_calls_what_was_called_before(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    calls: list[tuple[str, bool]] = []

    def noted(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, "courier" in threading.current_thread().name))
            return method(*args, **kwargs)

        monkeypatch.setattr(kind, name, call)

    algorithm, options = CASES[case]
    kind = type(from_spec(options["codec"]))
    for name in dir(kind):
        if name.startswith(("encode", "decode")):
            noted(kind, name)

    def rank(communicator: Communicator) -> None:
        module = nn.Linear(7, 30)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        model = algorithm(module, optimizer, communicator=communicator, **options)
        communicator.all_gather_object(None)
        for step in range(6):
            optimizer.zero_grad()
            model(batch(communicator.rank, step)).square().mean().backward()
            optimizer.step()
            model.wait()
        # Where both cores are busy, training may be through before a courier has had a turn.
        limits.until(lambda: any(courier for _, courier in list(calls)), "a courier has encoded or decoded")
        model.synchronize()
        model.close()

    run_ranks(2, rank)
    by_courier = {name for name, courier in calls if courier}
    assert by_courier
    for name in by_courier:
        assert not next(courier for other, courier in calls if other == name), name
