"""Runs a function on ranks that are threads."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from bagua_kernels.comm.backends.local.communicator import LocalCommunicator
from bagua_kernels.comm.backends.local.schedule import Schedule
from bagua_kernels.comm.backends.local.world import LocalWorld, synchronize
from bagua_kernels.errors import CollectiveTimeoutError

T = TypeVar("T")

_LONGEST_RUN = 600.0  # seconds: a rank that computes for ever must not hold a test for ever


def run_ranks(
    size: int,
    fn: Callable[..., T],
    *args: Any,
    timeout: float = 20.0,
    schedule: Schedule | None = None,
    device: torch.device | str | None = None,
) -> list[T]:
    """Runs `fn(communicator, *args)` on `size` threads, each a rank of one `LocalWorld`.

    A rank that returns or raises while others still wait for it makes them raise `RankLostError`. Ranks on a GPU share it.
    Each has a stream of its own, which is the current one in `fn`, and runs backward passes on its own thread.

    Args:
        size: the number of ranks.
        fn: what every rank runs.
        args: given to every rank after its communicator: the same objects, shared.
        timeout: seconds after which an operation that does not finish raises an error.
        schedule: runs the ranks one at a time, in an order that its seed decides, by a virtual clock. Functions of ranks
            then wait for one another through communicators and this schedule only.
        device: where tensors are; the CPU by default. "cuda" is the current GPU.

    Returns:
        What each rank returned, in rank order.

    Raises:
        BaseException: what the first rank to fail raised, with a note that names the rank.
        CollectiveTimeoutError: if a rank still runs after ten minutes.
        DeadlockError: if ranks under a schedule cannot go on.
    """
    place = torch.device("cpu" if device is None else device)
    if place == torch.device("cuda"):
        place = torch.device("cuda", torch.cuda.current_device())
    world = LocalWorld(size, timeout, place, clock=schedule)
    synchronize(place)
    results: dict[int, T] = {}
    errors = [] if schedule is None else schedule.errors  # by time, with those of threads that ranks have started

    def run(rank: int) -> None:
        communicator = LocalCommunicator(world, world.group("world", tuple(range(size))), rank)
        try:
            with _alone_on(place):
                results[rank] = fn(communicator, *args)
        except BaseException as error:  # of whatever kind: it is raised again below, on the caller's thread
            error.add_note(f"raised by rank {rank} of {size}")
            errors.append(error)
            world.lose(rank, f"it raised {type(error).__name__}: {error}")
        else:
            world.lose(rank, "its function has returned")

    targets = {f"rank {rank}": functools.partial(run, rank) for rank in range(size)}
    if schedule is not None:
        schedule.run(targets)
        return [results[rank] for rank in range(size)]
    threads = [world.clock.thread(target, name) for name, target in targets.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _LONGEST_RUN
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    running = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if running:
        raise CollectiveTimeoutError(f"ranks {running} still run after {_LONGEST_RUN:g} s", ranks=running)
    return [results[rank] for rank in range(size)]


@contextlib.contextmanager
def _alone_on(device: torch.device) -> Iterator[None]:
    """Gives the calling thread what a process has on a GPU: the current device, a stream, and backward passes of its own.

    By default all backward passes on a GPU share one thread, where a hook of one rank would hold up the other ranks.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)), torch.autograd.set_multithreading_enabled(False):
        yield
        synchronize(device)
