"""What samplers of all ranks have in common is compared when they are made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from bagua_kernels import comm
from bagua_kernels.algorithms.wrapping.recorded import describe, differences
from bagua_kernels.comm import Communicator
from bagua_kernels.comm.communicator import gather_json


def ranks_of(num_replicas: int | None, rank: int | None) -> Communicator | None:
    """Returns the communicator of `comm.init()` for a sampler of this process's own rank; None where there is none.

    A sampler whose ranks are given may be one of several in one process, which nobody else makes.
    """
    if num_replicas is None and rank is None and comm.is_initialized():
        world = comm.world()
        # The others of a job that this process has joined made theirs long ago.
        members = getattr(world, "members", None)
        joined = members is not None and members.has_joined
        return None if joined else world
    return None


@contextlib.contextmanager
def agreed(owner: str, communicator: Communicator | None) -> Iterator[dict[str, Any]]:
    """Compares what the block puts into a dictionary with that of the other ranks, by name; collective.

    Args:
        owner: the class that is made, for errors.
        communicator: the ranks; nothing is compared if None.

    Raises:
        ValueError: on all ranks, if values differ, or if the block raised on another rank.
    """
    own: dict[str, Any] = {}
    try:
        yield own
    except Exception as error:
        if communicator is not None and communicator.size > 1:
            gather_json(communicator, {"problem": f"{type(error).__name__}: {error}"})
        raise
    if communicator is None or communicator.size == 1:
        return
    everyone = gather_json(communicator, {"values": [[owner, name, describe(value)] for name, value in own.items()]})
    for rank, theirs in enumerate(everyone):
        if "problem" in theirs:
            raise ValueError(f"{owner} could not be made on rank {rank}: {theirs['problem']}")
    if found := differences([theirs["values"] for theirs in everyone]):
        raise ValueError(
            f"{'; '.join(found)}: make {owner} with the same on all ranks, or they draw samples twice or never"
        )
