"""Ranks as threads of one process: for tests, and for looking at an algorithm without a launcher."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Self

import torch

from bagua_kernels.comm.backends.local.world import (
    Collective,
    Combine,
    LocalGroup,
    LocalWork,
    LocalWorld,
    Parts,
    synchronize,
)
from bagua_kernels.comm.communicator import Communicator, checked_timeout
from bagua_kernels.comm.failures.failure import different_calls
from bagua_kernels.comm.reduction import ReduceOp, reduce_in_order
from bagua_kernels.comm.work import CLOSED, FINISHED, Work
from bagua_kernels.errors import MismatchError


class LocalCommunicator(Communicator):
    """One rank of a `LocalWorld`; made by `LocalWorld.communicator` or `run_ranks`.

    Inputs are copied when an operation starts and outputs are written in `wait`, on the waiting thread. An algorithm that
    does not wait gets no result. On a GPU the host waits for both copies. Reductions run in rank order, in the tensor's
    dtype, once for all ranks. `send` is buffered. Ranks that call different operations, or the same with different
    arguments, all get a `CommunicationError`. `bytes_sent` counts what the ring algorithms of a network would send.
    """

    def __init__(self, world: LocalWorld, group: LocalGroup, rank: int) -> None:
        self._assign(rank, len(group.ranks), world.device, world.timeout, group.secret)
        self._world = world
        self._group = group
        self._sequence = 0
        self._shared = itertools.count()
        self._messages: dict[tuple[int, int, int], int] = {}

    @classmethod
    def alone(cls, timeout: float = 20.0, device: torch.device | None = None) -> Self:
        """Returns a communicator of one rank."""
        world = LocalWorld(1, timeout, device)
        return cls(world, world.group("world", (0,)), 0)

    def set_timeout(self, seconds: float) -> None:
        """See `Communicator.set_timeout`; holds for all ranks of the `LocalWorld`."""
        self.timeout = self._world.timeout = checked_timeout(seconds)

    def abort(self, reason: str = "it was aborted") -> None:
        """See `Communicator.abort`."""
        self._leave(reason)

    def close(self, limit: float | None = None) -> None:
        """See `Communicator.close`; `limit` is not needed, for threads of one process do not hang unseen."""
        if not self._unusable():
            self.barrier().wait()
            self._leave(CLOSED)

    def shared_by_ranks(self, name: str) -> tuple[LocalWorld, object, tuple[int, ...]]:
        """Returns the world, a key that is the same on all ranks and new at each call, and the ranks in the world."""
        self._check_usable()
        return self._world, (self._group, name, next(self._shared)), self._group.ranks

    def _leave(self, reason: str) -> None:
        with self._world.changed:
            self._group.gone.setdefault(self.rank, reason)
            self._world.changed.notify_all()

    def _unusable(self) -> str:
        return self._group.gone.get(self.rank, "")

    def _split(self, ranks: tuple[int, ...]) -> LocalCommunicator:
        members = tuple(self._group.ranks[rank] for rank in ranks)
        group = self._world.group((self._group, self._next_split(ranks)), members)
        return LocalCommunicator(self._world, group, ranks.index(self.rank))

    def _broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        sent = 0 if self.rank == (src - 1) % self.size else tensor.nbytes
        signature = ("broadcast", tensor.dtype, tensor.numel(), src)
        return self._start(signature, tensor, tensor, lambda parts: [parts[src]] * len(parts), sent)

    def _reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp) -> Work:
        sent = 0 if self.rank == dst else tensor.nbytes
        output = tensor if self.rank == dst else None
        signature = ("reduce", tensor.dtype, tensor.numel(), dst, op)
        return self._start(signature, tensor, output, lambda parts: [reduce_in_order(parts, op)] * len(parts), sent)

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        sent = 2 * (self.size - 1) * tensor.nbytes // self.size
        signature = ("all_reduce", tensor.dtype, tensor.numel(), op)
        return self._start(signature, tensor, tensor, lambda parts: [reduce_in_order(parts, op)] * len(parts), sent)

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        sent = (self.size - 1) * input.nbytes
        signature = ("all_gather", input.dtype, input.numel())
        return self._start(signature, input, output, lambda parts: [torch.cat(parts)] * len(parts), sent)

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp) -> Work:
        sent = (self.size - 1) * output.nbytes
        signature = ("reduce_scatter", input.dtype, input.numel(), op)
        return self._start(signature, input, output, lambda p: list(reduce_in_order(p, op).chunk(len(p))), sent)

    def _all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Work:
        def deal(parts: list[Any]) -> Parts:
            everyone = range(len(parts))
            pieces = [data.split(splits) for data, splits, _ in parts]
            for src in everyone:
                for dst in everyone:
                    if pieces[src][dst].numel() != parts[dst][2][src]:
                        raise ValueError(
                            f"rank {src} sends {pieces[src][dst].numel()} elements to rank {dst}, which expects "
                            f"{parts[dst][2][src]}"
                        )
            return [torch.cat([row[rank] for row in pieces]) for rank in everyone]

        sent = input.nbytes - input_splits[self.rank] * input.itemsize
        brought = (input.reshape(-1).clone(), input_splits, output_splits)
        return self._start(("all_to_all", input.dtype), brought, output, deal, sent)

    def _gather(self, output: torch.Tensor | None, input: torch.Tensor, dst: int) -> Work:
        sent = 0 if self.rank == dst else input.nbytes
        signature = ("gather", input.dtype, input.numel(), dst)
        return self._start(signature, input, output, lambda parts: [torch.cat(parts)] * len(parts), sent)

    def _scatter(self, output: torch.Tensor, input: torch.Tensor | None, src: int) -> Work:
        sent = 0 if input is None else input.nbytes - output.nbytes
        brought = output.new_empty(0) if input is None else input
        signature = ("scatter", output.dtype, output.numel(), src)
        return self._start(signature, brought, output, lambda parts: list(parts[src].chunk(len(parts))), sent)

    def _barrier(self) -> Work:
        return self._start(("barrier",), torch.empty(0, dtype=torch.uint8), None, lambda parts: parts, 0)

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        letter = tensor.reshape(-1).clone()
        synchronize(self.device)
        with self._world.changed:
            self._group.mail[self._message(self.rank, dst, tag)] = letter
            self._world.changed.notify_all()
        self.bytes_sent += tensor.nbytes
        return FINISHED

    def _recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        key = self._message(src, self.rank, tag)
        mail = self._group.mail
        return self._work(f"recv from rank {src}", lambda: [] if key in mail else [src], lambda: mail.pop(key), tensor)

    def _message(self, src: int, dst: int, tag: int) -> tuple[int, int, int, int]:
        before = self._messages.get((src, dst, tag), 0)
        self._messages[src, dst, tag] = before + 1
        return src, dst, tag, before

    def _start(
        self, signature: tuple[object, ...], brought: Any, output: torch.Tensor | None, combine: Combine, sent: int
    ) -> Work:
        """Brings this rank's part to collective number `_sequence`; the last rank to arrive computes for all."""
        if isinstance(brought, torch.Tensor):
            brought = brought.reshape(-1).clone()
        synchronize(self.device)
        group, number = self._group, self._sequence
        self._sequence += 1
        self.bytes_sent += sent
        with self._world.changed:
            collective = group.collectives.setdefault(number, Collective(signature, self.rank))
            collective.brought[self.rank], collective.calls[self.rank] = brought, self.call
            complete = len(collective.brought) == self.size
            if collective.signature != signature:
                calls = {rank: collective.calls[rank] for rank in sorted((self.rank, collective.first))}
                collective.mismatch = (
                    f"rank {self.rank} called {_call(signature)} where rank {collective.first} called "
                    f"{_call(collective.signature)}{different_calls(calls)}: all ranks must issue the same operations in the "
                    "same order"
                )
                self._world.changed.notify_all()
            if complete:
                collective.last = self.rank
                del group.collectives[number]
        if complete:
            # Outside the lock, so that other groups go on; nobody takes a result before it is announced below.
            results, reason = None, collective.mismatch
            if not reason:
                try:
                    results = combine([collective.brought[rank] for rank in range(self.size)])
                    synchronize(self.device)
                except ValueError as error:
                    reason = str(error)
            with self._world.changed:
                collective.results, collective.mismatch = results, reason
                self._world.changed.notify_all()

        def missing() -> list[int]:
            if collective.mismatch:
                raise MismatchError(f"{signature[0]} #{number} failed: {collective.mismatch}")
            absent = [rank for rank in range(self.size) if rank not in collective.brought]
            # Where all are here but nothing is announced yet, the last to arrive is still computing.
            return absent if absent or collective.results is not None else [collective.last]

        def take() -> torch.Tensor:
            assert collective.results is not None
            return collective.results[self.rank]

        return self._work(f"{signature[0]} #{number}", missing, take, output)

    def _work(
        self, name: str, missing: Callable[[], list[int]], take: Callable[[], torch.Tensor], output: torch.Tensor | None
    ) -> Work:
        return LocalWork(self._world, self._group, self.rank, name, missing, take, output)


def _call(signature: tuple[object, ...]) -> str:
    name, *arguments = signature
    return f"{name}({', '.join(map(str, arguments))})"
