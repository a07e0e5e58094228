"""How a process ends after a failure."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.comm.testing import Processes
from bagua_kernels.errors import CommunicationError
from tests import limits

TIMEOUT, LINGER = limits.seconds(4), limits.seconds(2)


class Slow:
    """Ends slowly, while the interpreter is being taken down and other threads still run."""

    def __del__(self) -> None:
        """Tells, and sleeps without the interpreter's lock."""
        os.write(1, b"FINALIZING\n")
        time.sleep(LINGER)


kept: list[Slow] = []


def outlives() -> None:
    """Rank 0 comes to a halt, with whatever it has started; rank 1 gives it up and exits."""
    communicator = comm.init(timeout=TIMEOUT)
    x = torch.ones(100)
    communicator.all_reduce(x).wait()
    children = "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    print("GOING", json.dumps([os.getpid(), *map(int, children.split())]), flush=True)
    if communicator.rank == 0:
        time.sleep(limits.NEVER)
    try:
        while True:
            communicator.all_reduce(x).wait()
    except CommunicationError as error:
        print("TOLD", getattr(error, "ranks", None), flush=True)
    kept.append(Slow())


@pytest.mark.slow
def test_a_survivor_ends_in_order_while_the_store_hangs() -> None:
    """What a thread asked of a store that is stopped comes back, as an error, while the interpreter ends."""
    with Processes(outlives, 2, env={"BAGUA_KERNELS_HEARTBEAT": f"{limits.seconds(0.2)}"}) as processes:
        for rank in range(2):
            processes.wait_for_output(rank, "GOING", timeout=limits.seconds(60))
        halted = json.loads(processes.output(0).split("GOING ")[1])
        try:
            for pid in halted:
                os.kill(pid, signal.SIGSTOP)
            processes.wait_for_output(1, "FINALIZING", timeout=limits.seconds(60))
        finally:
            for pid in halted:
                os.kill(pid, signal.SIGKILL)
        (result,) = processes.wait(limits.seconds(30), [1])
    assert result.returncode == 0, result.stderr
    assert "TOLD (0,)" in result.stdout
