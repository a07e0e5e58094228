"""Local steps with processes over sockets: outer parameters with the same bits, and what simulations expect."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.algorithms import DiLoCo
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.testing import run_processes
from tests import limits
from tests.algorithms import parts
from tests.algorithms.gossip.common import Quadratic, Task, error, falling, flat
from tests.algorithms.local_steps.common import ALL, Case, follow
from tests.algorithms.local_steps.test_every_codec import CODECS, EVERYTHING
from tests.algorithms.local_steps.test_simulation import CASES, STEPS, inner
from tests.algorithms.ranks import compiled_beside_plain

ON_CODECS = {f"codec {codec}": Case(DiLoCo, {"codec": codec, **EVERYTHING}) for codec in CODECS}
EVERY: dict[str, Case] = {**ALL, **ON_CODECS}


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(each.float().numpy().tobytes() for each in tensors)).hexdigest()


def outer_parameters(communicator: Communicator, case: Case, dtype: torch.dtype) -> list[str]:
    """Trains for three rounds; returns a digest of the outer parameters after each step."""
    module = Quadratic(dtype=dtype)
    task, optimizer = Task(flat(module).numel()), torch.optim.SGD(module.parameters(), lr=0.5)
    with case.make(module, optimizer, communicator) as model:
        seen = []
        for step in range(12):
            optimizer.param_groups[0]["lr"] = falling(step)
            optimizer.zero_grad()
            task.loss(model, communicator.rank, step).backward()
            optimizer.step()
            seen.append(digest(*(parts.start(model, bucket) for bucket in model.local.flat.buckets)))
    return seen


def traced(communicator: Communicator) -> dict[str, Any]:
    """What each algorithm's outer parameters and last parameters have been."""
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, case in EVERY.items():
            found[f"{name} {dtype}"] = outer_parameters(communicator, case, dtype)
    for name, (case, _) in CASES.items():
        found[name] = follow(communicator, case, STEPS)[-1].tolist()
    return found


def report() -> None:
    """Trains with each algorithm in turn, and prints what came of it."""
    communicator = comm.init(timeout=limits.seconds(200))
    print(json.dumps(traced(communicator)))
    comm.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_processes_compute_what_threads_compute(size: int) -> None:
    """Bit for bit where sums have one order, and within 1e-6 of the simulations."""
    results = run_processes(report, size, timeout=limits.seconds(400))
    assert [r.returncode for r in results] == [0] * size, results[0].stderr[-3000:]
    reports = [json.loads(r.stdout.splitlines()[-1]) for r in results]
    rounds = [{key: seen for key, seen in one.items() if key not in CASES} for one in reports]
    assert all(each == rounds[0] for each in rounds)
    assert all(len(set(seen)) >= 2 for seen in rounds[0].values())
    if size == 2:
        for theirs, ours in zip(reports, run_ranks(size, traced), strict=True):
            assert theirs == ours
    for name, (_, simulation) in CASES.items():
        expected = simulation(inner(0.0), size).run(STEPS).trajectory[-1:]
        found = np.array([[one[name] for one in reports]])
        assert error(found, expected) <= 1e-6, name


def compiled() -> None:
    """Trains a compiled module and a plain one, each of them wrapped."""
    communicator = comm.init(timeout=limits.seconds(100))
    for case in (ALL["diloco"], ALL["streaming"]):
        for model in compiled_beside_plain(communicator, case, 6):
            assert model.stats().steps == 6
            assert model.stats().bytes_sent > 0
            model.close()
    comm.shutdown()


@pytest.mark.slow
def test_compiled_modules() -> None:
    results = run_processes(compiled, 2, timeout=limits.seconds(200))
    assert [r.returncode for r in results] == [0, 0], results[0].stderr[-2000:]
