"""Waiting until a communicator on the stand-in has been given up, or until the other ranks have heard of a rank."""

from __future__ import annotations

import time

from bagua_kernels.comm.backends.nccl.communicator import NcclCommunicator
from bagua_kernels.comm.work import Work
from tests.comm.backends.nccl.fake_cuda import LIMIT


def await_end(c: NcclCommunicator) -> None:
    """Waits until a communicator has been given up."""
    deadline = time.monotonic() + LIMIT
    while not c.session.ended:
        assert time.monotonic() < deadline, "it was not given up"
        time.sleep(0.005)


def go_on(c: NcclCommunicator, work: Work) -> None:
    """Waits for work until its communicator is given up, then calls an operation; either of them raises the error."""
    work.wait()
    await_end(c)
    c.barrier()


def await_heartbeats(c: NcclCommunicator) -> None:
    """Waits until the other ranks have been told which operation this rank is in."""
    liveness = c.session.liveness
    assert liveness is not None
    until, deadline = liveness.clock() + 4 * liveness.heartbeat, time.monotonic() + LIMIT
    while liveness.clock() < until:
        assert time.monotonic() < deadline, "a rank has no heartbeat"
        time.sleep(0.005)
