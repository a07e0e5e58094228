"""Waiting until a communicator on the stand-in has been given up, or until the other ranks have heard of a rank."""

from __future__ import annotations

from bagua_kernels.comm.backends.nccl.communicator import NcclCommunicator
from bagua_kernels.comm.work import Work
from tests import limits


def await_end(c: NcclCommunicator) -> None:
    """Waits until a communicator has been given up."""
    limits.until(lambda: c.session.ended, "the communicator is given up")


def go_on(c: NcclCommunicator, work: Work) -> None:
    """Waits for work until its communicator is given up, then calls an operation; either of them raises the error."""
    work.wait()
    await_end(c)
    c.barrier()


def await_heartbeats(c: NcclCommunicator) -> None:
    """Waits until the other ranks have been told which operation this rank is in."""
    liveness = c.session.liveness
    assert liveness is not None
    until = liveness.clock() + 4 * liveness.heartbeat
    limits.until(lambda: liveness.clock() >= until, "four heartbeats have passed")
