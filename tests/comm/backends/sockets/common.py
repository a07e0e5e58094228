"""Loops against one another and against bytes written by hand, ranks over sockets, and what they may leave."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.backends.sockets.loop import Loop
from bagua_kernels.comm.backends.sockets.schedules import messages
from bagua_kernels.comm.backends.sockets.transfer import Lane, Operation, Transfers, signature
from bagua_kernels.comm.backends.sockets.tuning import EVER, Tuning
from tests import limits
from tests.comm import contract

SEND = signature("send")
HEADER = struct.Struct("<QQQIQQQ")
Lanes = Sequence[Callable[[Lane], Transfers]]

# Cases that cost little and still use most of the protocol.
LIGHT = [
    contract.case_many_at_once,
    contract.case_shapes_and_autograd,
    contract.case_point_to_point,
    contract.case_neighbour_exchange,
    contract.case_all_to_all_v,
    contract.case_average_of_halves_does_not_overflow,
]


def operation(
    number: int, lanes: Lanes, *, name: str = "send", code: int = SEND, window: int = 4, brief: bool = False
) -> Operation:
    """An operation of some lanes."""
    return Operation(name, number, code, iter(lanes), window, brief)


def sending(number: int, tensor: torch.Tensor, peer: int = 1, *, brief: bool = False) -> Operation:
    """One message to a peer."""
    return operation(number, [partial(messages, [(peer, tensor)], [])], brief=brief)


def receiving(number: int, tensor: torch.Tensor, peer: int = 1, *, brief: bool = False) -> Operation:
    """One message from a peer."""
    return operation(number, [partial(messages, [], [(peer, tensor)])], brief=brief)


def wait(work: Operation, seconds: float = 10.0) -> None:
    """Waits for an operation, for long enough on a busy machine."""
    work.wait(timedelta(seconds=limits.seconds(seconds)))


def until(condition: Callable[[], bool]) -> None:
    """Waits until the thread of a loop has come to something that it tells nobody."""
    limits.until(condition, "the thread of the loop has come so far", limit=60, pause=0.002)


def part(number: int, data: bytes, offset: int = 0, total: int | None = None, *, code: int = SEND) -> bytes:
    """A part of a message as it is on the wire."""
    return HEADER.pack(0, number, code, 0, offset, len(data), len(data) if total is None else total) + data


def data(n: int, seed: int = 0) -> torch.Tensor:
    """Bytes of no pattern."""
    return torch.from_numpy(np.random.default_rng([n, seed]).integers(0, 256, n, dtype=np.uint8))


@contextlib.contextmanager
def by_hand(count: int = 1) -> Iterator[tuple[Loop, list[socket.socket]]]:
    """A loop of rank 0, and the other ends of its sockets to rank 1."""
    pairs = [socket.socketpair() for _ in range(count)]
    made = Loop("by hand", {1: [ours for ours, _ in pairs]}, lambda n: None)
    try:
        yield made, [theirs for _, theirs in pairs]
    finally:
        made.stop("the test is over")
        for _, theirs in pairs:
            theirs.close()


@contextlib.contextmanager
def over_tcp() -> Iterator[tuple[Loop, socket.socket]]:
    """A loop of rank 0, and the other end of its connection to rank 1."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made = Loop("over TCP", {1: [ours]}, lambda n: None)
    try:
        yield made, theirs
    finally:
        made.stop("the test is over")
        theirs.close()


@contextlib.contextmanager
def two(count: int = 1) -> Iterator[tuple[Loop, Loop]]:
    """Loops of ranks 0 and 1."""
    pairs = [socket.socketpair() for _ in range(count)]
    loops = tuple(Loop(f"rank {r}", {1 - r: [pair[r] for pair in pairs]}, lambda n: None) for r in range(2))
    try:
        yield loops[0], loops[1]
    finally:
        for made in loops:
            made.stop("the test is over")


@contextlib.contextmanager
def leaving_nothing() -> Iterator[None]:
    """Checks that what is done meanwhile leaves no thread and no file descriptor."""
    before, threads = descriptors(), set(threading.enumerate())
    yield
    until(lambda: set(threading.enumerate()) <= threads)
    # What other tests have left to the collector may have been closed meanwhile.
    assert descriptors() <= before


def descriptors() -> set[tuple[str, str]]:
    """The open file descriptors of this process, with what they are of."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


def array(n: int) -> tuple[np.ndarray, weakref.ref[np.ndarray]]:
    """Memory whose end can be seen; tensors made of it share it."""
    memory = np.zeros(n, dtype=np.uint8)
    return memory, weakref.ref(memory)


T = TypeVar("T")
# Pieces of few elements; messages that are not cut into pieces go through two sockets.
TIGHT = Tuning(piece=1000, window=3, stripes=2, split=100)


def by_way(way: str) -> Tuning:
    """A table with one way of all-reduce."""
    return Tuning(all_reduce=((EVER, way),), piece=20_000, window=2, stripes=2, split=100)


def striped(
    size: int, fn: Callable[[StripedCommunicator], T], tuning: Tuning = TIGHT, stripes: int = 2, timeout: float = 20.0
) -> list[T]:
    """Runs `fn` on ranks that are threads, over sockets; closes at the end, and aborts where it fails."""

    def run(c: Communicator) -> T:
        communicator = StripedCommunicator(c, stripes=stripes, tuning=tuning, host="127.0.0.1")
        try:
            result = fn(communicator)
            communicator.close()
        finally:
            communicator.abort()
        return result

    return run_ranks(size, run, timeout=timeout)
