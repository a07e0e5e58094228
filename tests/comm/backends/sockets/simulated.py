"""Ranks over simulated lines with a clock of their own: the communicator and its schedules are the real ones."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.backends.sockets.context import Context
from bagua_kernels.comm.backends.sockets.costs import Line, fitted
from bagua_kernels.comm.backends.sockets.loop import Loop
from bagua_kernels.comm.backends.sockets.schedules import Ranks
from bagua_kernels.comm.backends.sockets.transfer import Lane, Operation, Transfer
from bagua_kernels.comm.backends.sockets.tuning import Tuning
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.work import Work

Key = tuple[int, int, int]  # sender, number of the operation, tag


class SimulatedLoop(Loop):
    """A loop whose messages go through a `Network`; lanes advance as in the real one."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network = network
        self.rank = rank
        self.out_free = self.in_free = 0.0
        self._running, self._ready, self._channels = {}, deque(), {}
        self._asked: dict[Key, Transfer] = {}
        self._arrived: dict[Key, torch.Tensor] = {}

    def submit(self, operation: Operation) -> None:
        self._running[operation] = set()
        self._refill(operation)
        self._advance()

    def send(self, lane: Lane, peer: int, tag: int, data: memoryview) -> Transfer:
        network, transfer = self.network, Transfer(lane, peer, data, 1)
        self._running[lane.operation].add(transfer)
        network.sent[self.rank] += len(data)
        took = (len(data) + network.line.header) / network.line.rate
        begun = max(network.now, self.out_free)
        self.out_free = begun + took
        to, key = network.loops[peer], (self.rank, lane.operation.number, tag)
        contents = list[torch.Tensor]()

        def left() -> None:
            contents.append(network.contents(data))
            self._done(transfer)
            self._advance()

        def reaches() -> None:
            # The receiver's line takes one message after the other, too.
            to.in_free = max(network.now, to.in_free) + took
            network.at(max(to.in_free, begun + took), lambda: to.arrive(key, contents[0]))

        network.at(self.out_free, left)
        network.at(begun + network.line.delay, reaches)
        return transfer

    def receive(self, lane: Lane, peer: int, tag: int, data: memoryview | int) -> Transfer:
        to, total = (None, data) if isinstance(data, int) else (data, len(data))
        transfer = Transfer(lane, peer, to, total)
        self._running[lane.operation].add(transfer)
        key = peer, lane.operation.number, tag
        contents = self._arrived.pop(key, None)
        if contents is None:
            self._asked[key] = transfer
        else:
            self._take(transfer, contents)
        return transfer

    def arrive(self, key: Key, contents: torch.Tensor) -> None:
        transfer = self._asked.pop(key, None)
        if transfer is None:
            self._arrived[key] = contents
            return
        self._take(transfer, contents)
        self._advance()

    def _take(self, transfer: Transfer, contents: torch.Tensor) -> None:
        assert transfer.left == contents.numel()
        if transfer.data is None:
            transfer.own = contents
        elif self.network.copy:
            transfer.data[:] = contents.numpy().data
        self._done(transfer)

    def free(self, own: torch.Tensor) -> None:
        pass

    def moved(self) -> int:
        return 0

    def use(self, stripes: int, split: int) -> None:
        pass


class _Base:
    def _unusable(self) -> str:
        return ""


class Network:
    """Some ranks on equal lines, each of which sends and receives at the line's rate at the same time.

    Args:
        size: the number of ranks.
        line: as given; processors take no time.
        tuning: by default the one that suits the ranks and the line.
        copy: False if contents need not arrive, but only their number of bytes.

    Attributes:
        now: virtual seconds.
        sent: bytes that each rank has sent, without headers.
    """

    def __init__(self, size: int, line: Line, tuning: Tuning | None = None, copy: bool = True) -> None:
        self.line, self.copy, self.now = line, copy, 0.0
        self.sent = [0] * size
        self._bytes = torch.zeros(0, dtype=torch.uint8)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.loops = [SimulatedLoop(self, rank) for rank in range(size)]
        self.communicators = [self._communicator(rank, size, tuning or fitted(size, line)) for rank in range(size)]

    def _communicator(self, rank: int, size: int, tuning: Tuning) -> StripedCommunicator:
        made: Any = object.__new__(StripedCommunicator)
        made._assign(rank, size, torch.device("cpu"), 60.0, Secret.random())
        made.base, made.stripes, made.tuning, made._loop = _Base(), 1, tuning, self.loops[rank]
        made._context = Context(0, range(size), lambda nbytes: None)
        made._ranks, made._messages, made._counting = Ranks(rank, size), {}, threading.Lock()
        made.session = Session("simulated", 60.0, rank, tuple(range(size)), None)
        return made  # type: ignore[no-any-return]

    def contents(self, data: memoryview) -> torch.Tensor:
        """Returns a copy of a message, or as many bytes."""
        if not self.copy:
            if len(data) > self._bytes.numel():
                self._bytes = torch.zeros(len(data), dtype=torch.uint8)
            return self._bytes[: len(data)]
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)

    def at(self, moment: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._order), event))

    def seconds(self, start: Callable[[StripedCommunicator], Work]) -> float:
        """Returns how long a collective takes that all ranks start now."""
        begun = self.now
        works = [start(communicator) for communicator in self.communicators]
        last = begun
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
            last = self.now
        for work in works:
            work.wait()
        return last - begun
