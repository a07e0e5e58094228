"""Training with real processes over Gloo: equal replicas, and what happens when a rank is killed."""

from __future__ import annotations

import json
import signal

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm.testing import Processes, run_processes
from tests import limits
from tests.algorithms.ranks import Odd, batch
from tests.grids import only

pytestmark = pytest.mark.compiled


def train(spec: str, steps: int) -> None:
    """Trains and prints the bytes of the parameters."""
    communicator = comm.init(timeout=limits.seconds(20))
    algorithm = from_spec(spec, Odd(seed=communicator.rank), bucket_bytes=500)
    optimizer = torch.optim.AdamW(algorithm.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        algorithm(batch(communicator.rank, step)).square().mean().backward()
        optimizer.step()
        print(f"step {step}", flush=True)
    stats = algorithm.stats()
    parameters = torch.cat([p.detach().flatten() for p in algorithm.parameters()])
    print(json.dumps({"bytes": parameters.numpy().tobytes().hex(), "sent": stats.bytes_sent, "steps": stats.steps}))
    comm.shutdown()


@pytest.mark.parametrize("spec", only(["allreduce", "bytegrad"], "bytegrad"))
def test_three_processes_end_bit_identical(spec: str) -> None:
    results = run_processes(train, 3, args=(spec, 5), timeout=limits.seconds(60))
    assert [r.returncode for r in results] == [0, 0, 0], results[0].stderr[-2000:]
    reports = [json.loads(r.stdout.splitlines()[-1]) for r in results]
    assert reports[0]["bytes"] == reports[1]["bytes"] == reports[2]["bytes"]
    assert reports[0]["steps"] == 5
    assert reports[0]["sent"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "spec"), only([(0, "bytegrad"), (1, "bytegrad"), (1, "allreduce")], (0, "bytegrad"))
)
def test_a_killed_rank_is_named(victim: int, spec: str) -> None:
    """The others end with an error that names it, within twice their timeout of 20 seconds."""
    with Processes(train, 3, args=(spec, 10**6)) as processes:
        for rank in range(3):
            processes.wait_for_output(rank, "step 3", timeout=limits.seconds(60))
        processes.send_signal(victim, signal.SIGKILL)
        survivors = [r for r in range(3) if r != victim]
        results = processes.wait(limits.seconds(40), survivors)
    for result in results:
        assert result.returncode != 0
        assert "RankLostError" in result.stderr
        assert f"rank {victim}" in result.stderr.split("RankLostError")[-1]


def compiled() -> None:
    """Trains a compiled module and a plain one, each of them wrapped."""
    communicator = comm.init(timeout=limits.seconds(30))
    plain, other = (from_spec("bytegrad", Odd(seed=0), bucket_bytes=500) for _ in range(2))
    other.module.compile(backend="aot_eager")
    for step in range(3):
        for algorithm in (plain, other):
            algorithm.zero_grad()
            algorithm(batch(communicator.rank, step)).square().mean().backward()
        for a, b in zip(plain.parameters(), other.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.allclose(a.grad, b.grad, atol=2 / 255 * float(a.grad.abs().max()))
    comm.shutdown()


@pytest.mark.slow
def test_compiled_modules() -> None:
    results = run_processes(compiled, 2, timeout=limits.seconds(120))
    assert [r.returncode for r in results] == [0, 0], results[0].stderr[-2000:]
