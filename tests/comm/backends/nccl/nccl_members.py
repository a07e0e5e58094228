"""Members that are threads, with communicators over the stand-in for NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bagua_kernels.comm import LocalCommunicator, Membership, run_ranks
from bagua_kernels.comm.membership.transports import NcclTransport
from tests import limits
from tests.comm.backends.nccl.fake_nccl import World, threads_left

CPU = torch.device("cpu")


class Ended(BaseException):
    """A process has ended at this place."""


def ends(members: Membership) -> None:
    """Ends all members that are left, in order."""
    members.prepare_close()
    members.communicator.close()
    members.close()


def with_members(
    program: Callable[[Membership], Any],
    size: int = 3,
    world: World | None = None,
    runtime: Callable[[int], Any] | None = None,
) -> list[Any]:
    """Runs a program on members that are threads; one that returns early, or raises `Ended`, has ended without a word."""
    world = world or World(size)

    def run(anchor: LocalCommunicator) -> Any:
        members = None
        try:
            members = Membership(anchor, transport=NcclTransport(CPU, (runtime or world.runtime)(anchor.rank)))
            return program(members)
        except Ended:
            return None
        finally:
            if members is not None:
                members._end("its process has ended")

    found = run_ranks(size, run, timeout=limits.seconds(10.0))
    world.end()
    assert threads_left() == []
    return found
