"""A rank is killed while a child that it forked lives on and holds copies of its sockets, as loaders of data do."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.comm.testing import Processes
from bagua_kernels.errors import CommunicationError
from tests import limits

BEAT, VICTIM = limits.seconds(0.2), 1


def working() -> None:
    """All-reduces until somebody fails; the victim has a child first."""
    communicator = comm.init(timeout=limits.NEVER)
    x = torch.ones(1000)
    if communicator.rank == VICTIM:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            time.sleep(limits.NEVER)
            os._exit(0)
        print("CHILD", child, flush=True)
    communicator.all_reduce(x).wait()
    print("GOING", flush=True)
    try:
        while True:
            communicator.all_reduce(x, comm.ReduceOp.AVG).wait()
    except CommunicationError as error:
        told = {"kind": type(error).__name__, "ranks": error.__dict__.get("ranks"), "text": str(error)}
        print("TOLD", json.dumps(told), flush=True)
    comm.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("sockets", ["0", pytest.param("2", marks=pytest.mark.slow)], ids=["gloo", "sockets"])
def test_a_killed_rank_with_a_forked_child_is_named(sockets: str) -> None:
    """No connection of Gloo's breaks, and the timeout is beyond the limit of the test; but the process is gone."""
    environment = {"BAGUA_KERNELS_HEARTBEAT": str(BEAT), "BAGUA_KERNELS_SOCKETS": sockets}
    with Processes(working, 3, env=environment, fresh=True) as processes:
        for rank in range(3):
            processes.wait_for_output(rank, "GOING", timeout=limits.seconds(60))
        child = int(processes.output(VICTIM).split()[1])
        try:
            processes.send_signal(VICTIM, signal.SIGKILL)
            results = processes.wait(limits.seconds(40), [0, 2])
        finally:
            os.kill(child, signal.SIGKILL)
    for result in results:
        assert result.returncode == 0, result.stderr
        told = json.loads(result.stdout.split("TOLD ", 1)[1].splitlines()[0])
        assert (told["kind"], told["ranks"]) == ("RankLostError", [VICTIM]), told
