"""Decentralized training with processes over sockets: the bits of thread ranks, and modules that torch compiles."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.testing import run_processes
from tests import limits
from tests.algorithms.gossip.common import ALL, CASES, Case, error, follow, simulated
from tests.algorithms.ranks import compiled_beside_plain

STEPS = 20
EVERY: dict[str, Case] = {**CASES, **{f"{name}_lossy": ALL[name] for name in ("low_precision", "choco")}}


def trained(communicator: Communicator) -> dict[str, tuple[str, list[float]]]:
    """The digest of all parameters that each algorithm's run has had, and the last ones."""
    found = {}
    for name, case in EVERY.items():
        seen = torch.stack(follow(communicator, case, STEPS)).numpy()
        found[name] = hashlib.sha256(seen.tobytes()).hexdigest(), seen[-1].tolist()
    return found


def report() -> None:
    """Trains with each algorithm in turn, and prints what came of it."""
    communicator = comm.init(timeout=limits.seconds(60))
    print(json.dumps(trained(communicator)))
    comm.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_processes_compute_what_threads_compute(size: int) -> None:
    """Bit for bit, and within 1e-6 of the simulations."""
    results = run_processes(report, size, timeout=limits.seconds(110))
    assert [r.returncode for r in results] == [0] * size, results[0].stderr[-3000:]
    reports = [json.loads(r.stdout.splitlines()[-1]) for r in results]
    for theirs, ours in zip(reports, run_ranks(size, trained), strict=True):
        assert {name: found[0] for name, found in theirs.items()} == {name: found[0] for name, found in ours.items()}
    for name, case in CASES.items():
        expected = simulated(case, case.peers(size), STEPS)[-1:]
        found = np.array([[r[name][1] for r in reports]])
        assert error(found, expected) <= 1e-6, name


def compiled() -> None:
    """Trains a compiled module and a plain one, each of them wrapped."""
    communicator = comm.init(timeout=limits.seconds(60))
    compiled_beside_plain(communicator, ALL["decentralized"], 4)
    comm.shutdown()


@pytest.mark.slow
def test_compiled_modules() -> None:
    results = run_processes(compiled, 2, timeout=limits.seconds(110))
    assert [r.returncode for r in results] == [0, 0], results[0].stderr[-2000:]
