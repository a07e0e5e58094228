"""Children that are forked keep no connection of their parent open, and cannot use its communicators."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import time
import warnings

import pytest
import torch

from bagua_kernels import comm
from bagua_kernels.comm.backends.sockets.loop import Loop
from bagua_kernels.comm.backends.torch_distributed.communicator import TorchCommunicator
from bagua_kernels.comm.failures import forked
from bagua_kernels.comm.testing import Processes, run_processes
from bagua_kernels.errors import CommunicationError
from tests import limits
from tests.comm.backends.sockets.common import data, leaving_nothing, part, receiving, until, wait


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def test_child_keeps_no_socket_open() -> None:
    """The other rank sees the end of the connection though the child lives, and nothing changes while the parent does."""
    with leaving_nothing():
        ours, theirs = socket.socketpair()
        loop = Loop("bagua_kernels test", {1: [ours]}, lambda n: None)
        child = fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        try:
            # The child has copies until it has run what is registered; the parent's own socket still works.
            got = torch.zeros(3, dtype=torch.uint8)
            work = receiving(0, got)
            loop.submit(work)
            theirs.sendall(part(0, bytes(data(3).numpy())))
            wait(work)
            assert got.equal(data(3))
            loop.stop("over")
            theirs.settimeout(limits.seconds(10))
            assert theirs.recv(1) == b""
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            theirs.close()
    until(lambda: loop not in forked._forgetting or loop._woken == -1)


def parent() -> None:
    """One rank of two over Gloo alone, without signs of life; rank 1 has a child."""
    world = comm.init(timeout=limits.seconds(60))
    c = TorchCommunicator(timeout=limits.seconds(60), watch=False)
    assert c._group.sockets.found
    for descriptor in c._group.sockets.found:
        assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    if c.rank == 1:
        ready, told = os.pipe()
        child = fork()
        if child == 0:
            for broken in (lambda: c.barrier(), lambda: world.all_reduce(torch.ones(1))):
                with pytest.raises(CommunicationError, match="forked"):
                    broken()
            os.write(told, b"x")
            signal.pause()
            os._exit(0)
        assert os.read(ready, 1) == b"x"
        print("CHILD", child, flush=True)
    c.barrier().wait()
    print("GOING", flush=True)
    if c.rank == 1:
        time.sleep(100)
    with pytest.raises(CommunicationError):
        c.recv(torch.ones(1), 1).wait()
    print("ENDED", flush=True)
    os._exit(0)


@pytest.mark.slow
def test_killed_rank_with_a_child_is_missed_by_its_connections() -> None:
    """Gloo's sockets too."""
    with Processes(parent, 2, env={"BAGUA_KERNELS_SOCKETS": "0"}, fresh=True) as processes:
        for rank in range(2):
            processes.wait_for_output(rank, "GOING", timeout=limits.seconds(60))
        child = int(processes.output(1).split()[1])
        try:
            processes.send_signal(1, signal.SIGKILL)
            # Long before the timeout of 60 s, while the child lives.
            (result,) = processes.wait(limits.seconds(30), ranks=[0])
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)
    assert (result.returncode, result.stdout) == (0, "GOING\nENDED\n"), result.stderr


def ends_as_interpreters_end() -> None:
    """Children run what is registered for the exit, and destroy what torch's groups and the parent's threads had."""
    world = comm.init(timeout=limits.seconds(60))
    groups = [torch.distributed.new_group([0, 1])]
    mailbox = comm.open_mailbox(world)
    world.barrier().wait()
    children = []
    for _ in range(3):
        if not (child := fork()):
            del groups, mailbox
            sys.exit(0)
        children.append(child)
    print("STATUSES", [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], flush=True)
    world.barrier().wait()
    mailbox.leave()
    comm.shutdown()


def test_children_that_exit_do_not_wait_for_threads_of_the_parent() -> None:
    for result in run_processes(ends_as_interpreters_end, 2, timeout=limits.seconds(60)):
        assert result.returncode == 0, result.stderr[-3000:]
        assert "STATUSES [0, 0, 0]" in result.stdout
