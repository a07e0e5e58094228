"""What is left of a failure that a process survives."""

from __future__ import annotations

import gc
import json
import os

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.algorithms import ByteGrad
from bagua_kernels.comm.testing import run_processes
from bagua_kernels.comm.testing.processes import free_port
from bagua_kernels.errors import CommunicationError
from tests import limits


def again_and_again(ports: list[int]) -> None:
    """One rank: rank 1 fails, both leave the job, and both join the next one."""
    for port in ports:
        os.environ["MASTER_PORT"] = str(port)
        world = comm.init(timeout=limits.seconds(20))
        model = ByteGrad(torch.nn.Linear(8, 8))
        try:
            for step in range(10**6):
                model(torch.randn(4, 8)).sum().backward()
                if step == 3 and world.rank == 1:
                    raise ValueError("boom")
        except ValueError as error:
            model.__exit__(ValueError, error, None)
            world.abort("boom")
        except CommunicationError:
            model.close()
        comm.shutdown()
        del model, world
        gc.collect()
        print("LEFT", json.dumps([len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")]), flush=True)


@pytest.mark.slow
def test_failures_leave_no_descriptors_and_threads() -> None:
    ports = [free_port() for _ in range(5)]
    for result in run_processes(again_and_again, 2, args=(ports,), timeout=limits.seconds(100)):
        assert result.returncode == 0, result
        lines = [line for line in result.stdout.splitlines() if line.startswith("LEFT")]
        left = [json.loads(line.removeprefix("LEFT")) for line in lines]
        grown = [(last - first) / (len(left) - 1) for first, last in zip(left[0], left[-1], strict=True)]
        assert max(grown) < 2, left
