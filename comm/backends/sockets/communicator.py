"""A communicator over sockets of its own, for CPUs on a network that is long, slow or lossy."""

from __future__ import annotations

import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from bagua_kernels.comm.backends.sockets import mesh, schedules
from bagua_kernels.comm.backends.sockets.context import Context
from bagua_kernels.comm.backends.sockets.costs import Line, fitted
from bagua_kernels.comm.backends.sockets.loop import Loop
from bagua_kernels.comm.backends.sockets.schedules import Ranks, cut
from bagua_kernels.comm.backends.sockets.transfer import Lane, Operation, Transfers, signature
from bagua_kernels.comm.backends.sockets.tuning import Tuning
from bagua_kernels.comm.backends.torch_distributed.communicator import TorchCommunicator
from bagua_kernels.comm.communicator import Communicator, checked_timeout
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.failures.session_work import SessionWork
from bagua_kernels.comm.reduction import ReduceOp
from bagua_kernels.comm.work import CLOSED, Work

_BRIEF = 64 << 10  # bytes of an operation that are sent on the caller's thread
_LEAST = 4 << 10  # bytes of a rank's part, where the parts of all ranks are one piece
_MESSAGE = 1 << 63  # numbers from here on are messages between two ranks, those below are collectives


class StripedCommunicator(Communicator):
    """The ranks of another communicator, joined by one or more sockets of their own for each pair.

    Gloo's all-reduce is a ring: on n ranks a message waits for 4 (n - 1) one-way delays. Its reduce-scatter sends twice
    the necessary bytes, and each pair has one socket. Here small tensors take 1 delay and medium ones 2, and a
    reduce-scatter sends each part once. Large messages may be split over several sockets, as BAGUA-Net did for NCCL. `tuning`
    contains the way for each size; `tune` measures it. The communicator beneath is used where it is faster.

    Duplicates and splits share the sockets of the communicator that they come from, and the thread of these: each has a
    `Context`. Making one sends nothing, because its name and its secret follow from those of its parent and the number of
    the split. How they stay independent of one another is described at `Loop`.

    Results are reduced in rank order where one rank reduces, and have the same bits on all ranks in any case.
    `bytes_sent` counts what goes into the sockets, without headers.

    Args:
        base: a communicator on the CPU, which this one owns from now on: Gloo, or ranks as threads.
        stripes: sockets between two ranks; `tuning` contains the number of them that is used.
        tuning: equal on all ranks; by default the one that suits the number of ranks and the delay between them.
        host: the address to listen on; by default that of the interface which Gloo would use.
        deadline: when the time to connect is over, as of `time.monotonic`; by default after the timeout of `base`.
        exchange: gathers a value of every rank as JSON, in rank order; by default an operation of `base`.

    Raises:
        ValueError: if `base` is not on the CPU.
        CommunicationError: if the ranks cannot connect.
    """

    def __init__(
        self,
        base: Communicator,
        *,
        stripes: int = 1,
        tuning: Tuning | None = None,
        host: str = "",
        deadline: float | None = None,
        exchange: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        self._check(base, stripes)
        self._begin(base, stripes, tuning, host)
        if self.size > 1:
            by = time.monotonic() + base.timeout if deadline is None else deadline
            links = mesh.connect_over(base, stripes, host, base._sealed().secret.derive("sockets"), by, exchange)
            self._take(links, tuning)

    @classmethod
    def over(cls, base: Communicator, links: mesh.Links, host: str) -> StripedCommunicator:
        """Returns a communicator over connections that are there.

        Args:
            base: as for the constructor.
            links: the sockets to each other rank, as many to each.
            host: as for the constructor.
        """
        made = cls.__new__(cls)
        stripes = min((len(socks) for socks in links.values()), default=1)
        cls._check(base, stripes)
        made._begin(base, stripes, None, host)
        made._take(links, None)
        return made

    def _take(self, links: mesh.Links, tuning: Tuning | None) -> None:
        """Takes connections to all other ranks, of which it is the first user."""
        self._links = links
        loop = Loop(f"bagua_kernels sockets of rank {self.rank}", links, lambda n: None)
        self._share(loop, tuple(range(self.size)), tuning)

    @staticmethod
    def _check(base: Communicator, stripes: int) -> None:
        if base.device.type != "cpu":
            raise ValueError(f"StripedCommunicator expects a communicator on the CPU, got one on {base.device}")
        if isinstance(base, StripedCommunicator):
            raise ValueError("StripedCommunicator expects a communicator without sockets of its own: pass its base")
        if not hasattr(select, "epoll"):
            raise ValueError("StripedCommunicator needs epoll, which only Linux has: use its base")
        if stripes < 1:
            raise ValueError(f"expected at least one socket between two ranks, got {stripes=}")

    def _begin(self, base: Communicator, stripes: int, tuning: Tuning | None, host: str) -> None:
        """Sets everything but the sockets."""
        secret = base._sealed().secret
        self._assign(base.rank, base.size, base.device, base.timeout, secret.derive("striped"))
        self.base = base
        self.stripes = stripes
        self._host = host
        self._ranks = Ranks(base.rank, base.size)
        self._messages: dict[tuple[int, int, int], int] = {}
        self._counting = threading.Lock()
        everyone = tuple(range(base.size))
        if isinstance(base, TorchCommunicator):
            self.session = base.session.child("sockets", everyone)
        else:
            self.session = Session("world", base.timeout, base.rank, everyone, None)
        self.session.abandon = self._abandon
        self._loop: Loop | None = None
        self._context: Context | None = None
        self.tuning = self._fitted = tuning or Tuning()
        self.delay = 0.0  # the longest one way between two ranks, in seconds, as it was measured at the start

    def _share(self, loop: Loop, members: tuple[int, ...], tuning: Tuning | None) -> None:
        """Takes its part of a loop.

        Args:
            loop: of this communicator, or of that which it comes from.
            members: by rank, the rank as the loop numbers it.
            tuning: which ways to take; None for those that suit the number of ranks and the delay between them.
        """
        # The thread must not keep a communicator alive that nobody uses any more.
        counted: weakref.WeakMethod[Any] = weakref.WeakMethod(self._count)
        number = self.base._sealed().secret.derive("context").export()[:16]
        context = loop.open(int(number, 16), members, lambda n: _tell(counted, n))
        self._loop, self._context = loop, context
        self.delay = self._links.delay(members)
        self._fitted = fitted(self.size, Line.measured(self.delay))
        self.retune(tuning or self._fitted)
        self.session.moves = lambda: context.moved
        self.session.heard = lambda: {rank: loop.heard[peer] for rank, peer in enumerate(members) if peer in loop.heard}
        weakref.finalize(self, loop.leave, context, "it was forgotten, or its process exits", wait=False)
        _open.add(self)

    def retune(self, tuning: Tuning) -> None:
        """Follows another table from now on; every rank calls it with the same one, with nothing under way."""
        self.tuning = tuning
        if self._context is not None:
            self._context.use(tuning.stripes, tuning.split)

    def set_timeout(self, seconds: float) -> None:
        """See `Communicator.set_timeout`."""
        self.timeout = self.session.timeout = checked_timeout(seconds)
        self.base.set_timeout(seconds)

    def abort(self, reason: str = "it was aborted") -> None:
        """See `Communicator.abort`."""
        self.session.abort(reason)
        self._stop(reason)
        self.base.abort(reason)

    def close(self, limit: float | None = None) -> None:
        """See `Communicator.close`."""
        self.session.hurry(limit)
        deadline = time.monotonic() + self.session.timeout
        try:
            if not self.is_ended():
                if self.size > 1:
                    self.session.leaving = True
                    self.barrier().wait()
                self.session.close()
                # What is left of the time, for both farewells are one; the other ranks are there, as the first one shows.
                self.base.close(max(deadline - time.monotonic(), self.session.timeout / 10))
        finally:
            # After the base's own farewell, so that no rank sees a socket close while it still waits for the first one.
            self.session.ended = self.session.ended or CLOSED
            self._stop(CLOSED)

    def close_relatives(self) -> None:
        """See `Communicator.close_relatives`."""
        for communicator in list(_open):
            if self.session.liveness is not None and communicator.session.liveness is self.session.liveness:
                communicator.session.close()
                communicator._stop("its relatives were closed")
        self.base.close_relatives()

    def _abandon(self) -> None:
        self._stop("an operation has failed")
        if isinstance(self.base, TorchCommunicator):
            self.base.give_up(self.session.ended)
        else:
            self.base.abort()

    def _stop(self, reason: str) -> None:
        if self._loop is not None and self._context is not None:
            self._loop.leave(self._context, reason)
        _open.discard(self)

    def _unusable(self) -> str:
        return self.session.ended or self.base._unusable()

    def _split(self, ranks: tuple[int, ...]) -> StripedCommunicator:
        child = StripedCommunicator.__new__(StripedCommunicator)
        base = self.base.later(ranks) if isinstance(self.base, TorchCommunicator) else self.base._split(ranks)
        # What was chosen for this number of ranks need not suit another one.
        tuning = None if self.tuning is self._fitted else self.tuning
        child._begin(base, self.stripes, tuning, self._host)
        if self._loop is not None and self._context is not None and child.size > 1:
            child._links = self._links
            child._share(self._loop, tuple(self._context.members[rank] for rank in ranks), tuning)
        return child

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self.bytes_sent += nbytes

    def _beneath(self, call: Callable[[], Work]) -> Work:
        before, self.base.call = self.base.bytes_sent, self.call
        work = call()
        self._count(self.base.bytes_sent - before)
        return work

    def _start(
        self, name: str, code: int, lanes: Iterable[Callable[[Lane], Transfers]], nbytes: int, *, number: int | None = None,
        peer: int | None = None, finish: Callable[[], None] | None = None,
    ) -> Work:  # fmt: skip
        collective = number is None
        number = self.session.enter(name, self.call) if number is None else number
        assert self._loop is not None
        assert self._context is not None
        operation = Operation(
            name,
            self._context.number_of(number),
            code,
            iter(lanes),
            self.tuning.window,
            nbytes <= _BRIEF,
            self,
            self._context,
        )
        self._loop.submit(operation)
        counted, missing = number if collective else None, lambda: operation.missing()
        return SessionWork(self.session, operation, name, counted, peer, finish, device=None, missing=missing)

    def _pieces(self, size: int, *tensors: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
        """Cuts flat tensors of one length at the same places, `size` bytes apart."""
        flat = [tensor.view(-1) for tensor in tensors]
        parts = cut(flat[0].numel(), max(1, size // flat[0].itemsize))
        return (tuple(tensor[part] for tensor in flat) for part in parts)

    def _part(self, way: str) -> int:
        """Returns the bytes of a rank's part of an all-gather or reduce-scatter that are under way as one."""
        # In rounds, the parts of all ranks lie in one piece.
        return {"ring": self.tuning.link, "rounds": max(_LEAST, self.tuning.piece // self.size)}.get(
            way, self.tuning.piece
        )

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        way = self.tuning.way("all_reduce", tensor.nbytes)
        if way == "base":
            return self._beneath(lambda: self.base._all_reduce(tensor, op))
        make = _ALL_REDUCE[way]
        # Around a ring, a piece travels as one chunk a rank.
        size = self.tuning.link * self.size if way == "ring" else self.tuning.piece
        lanes = (partial(make, self._ranks, piece, op) for (piece,) in self._pieces(size, tensor))
        return self._start(
            "all_reduce", signature("all_reduce", tensor.dtype, op, way, nbytes=tensor.nbytes), lanes, tensor.nbytes
        )

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        way = self.tuning.way("all_gather", input.nbytes)
        if way == "base":
            return self._beneath(lambda: self.base._all_gather(output, input))
        code = signature("all_gather", input.dtype, way, nbytes=input.nbytes)
        pieces = self._pieces(self._part(way), input, *output.view(self.size, -1).unbind(0))
        if way != "direct":
            make = schedules.ring_all_gather if way == "ring" else schedules.gather_in_rounds
            lanes = (partial(make, self._ranks, outputs, mine) for mine, *outputs in pieces)
        else:
            lanes = (
                partial(schedules.all_to_all, self._ranks, outputs, [mine] * self.size) for mine, *outputs in pieces
            )
        return self._start("all_gather", code, lanes, output.nbytes)

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp) -> Work:
        way = self.tuning.way("reduce_scatter", output.nbytes)
        if way == "base":
            return self._beneath(lambda: self.base._reduce_scatter(output, input, op))
        code = signature("reduce_scatter", input.dtype, op, way, nbytes=input.nbytes)
        make = _REDUCE_SCATTER[way]
        pieces = self._pieces(self._part(way), output, *input.view(self.size, -1).unbind(0))
        lanes = (partial(make, self._ranks, into, parts, op) for into, *parts in pieces)
        return self._start("reduce_scatter", code, lanes, input.nbytes)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """See `Communicator.all_to_all`."""
        # Decided here, for all_to_all_v must not ask: parts that are even on one rank may be uneven on another.
        if self.size > 1 and isinstance(input, torch.Tensor):
            self._check_usable()
            if self.tuning.way("all_to_all", input.nbytes // self.size) == "base":
                return self._beneath(lambda: self.base.all_to_all(output, input))
        return super().all_to_all(output, input)

    def _all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Work:
        outputs, inputs = output.view(-1).split(output_splits), input.view(-1).split(input_splits)
        lane = partial(schedules.all_to_all, self._ranks, outputs, inputs)
        return self._start("all_to_all", signature("all_to_all", input.dtype), [lane], output.nbytes + input.nbytes)

    def _broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        way = self.tuning.way("broadcast", tensor.nbytes)
        if way == "base":
            return self._beneath(lambda: self.base._broadcast(tensor, src))
        code = signature("broadcast", tensor.dtype, src, way, nbytes=tensor.nbytes)
        flat = tensor.view(-1)
        if way == "star":
            star = partial(schedules.star, self._ranks, src, [flat], [flat] * self.size, inward=False)
            return self._start("broadcast", code, [star], tensor.nbytes)
        if way == "tree":
            return self._start("broadcast", code, [partial(schedules.tree, self._ranks, src, flat)], tensor.nbytes)
        make, size = (schedules.chain, self.tuning.link) if way == "chain" else (schedules.scattered, self.tuning.piece)
        lanes = (partial(make, self._ranks, src, piece) for (piece,) in self._pieces(size, tensor))
        return self._start("broadcast", code, lanes, tensor.nbytes)

    def _reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp) -> Work:
        lanes = (
            partial(schedules.rooted_reduce, self._ranks, dst, piece, op)
            for (piece,) in self._pieces(self.tuning.piece, tensor)
        )
        return self._start(
            "reduce", signature("reduce", tensor.dtype, dst, op, nbytes=tensor.nbytes), lanes, tensor.nbytes
        )

    def _gather(self, output: torch.Tensor | None, input: torch.Tensor, dst: int) -> Work:
        code = signature("gather", input.dtype, dst, nbytes=input.nbytes)
        outputs: list[torch.Tensor] = []
        if output is not None:
            outputs = list(output.view(self.size, -1).unbind(0))
            if outputs[dst].data_ptr() != input.data_ptr():
                outputs[dst].copy_(input.view(-1))
        star = partial(schedules.star, self._ranks, dst, outputs, [input.view(-1)], inward=True)
        return self._start("gather", code, [star], input.nbytes * self.size)

    def _scatter(self, output: torch.Tensor, input: torch.Tensor | None, src: int) -> Work:
        code = signature("scatter", output.dtype, src, nbytes=output.nbytes)
        inputs: list[torch.Tensor] = []
        if input is not None:
            inputs = list(input.view(self.size, -1).unbind(0))
            if inputs[src].data_ptr() != output.data_ptr():
                output.view(-1).copy_(inputs[src])
        star = partial(schedules.star, self._ranks, src, [output.view(-1)], inputs, inward=False)
        return self._start("scatter", code, [star], output.nbytes * self.size)

    def _barrier(self) -> Work:
        way, token = self.tuning.way("barrier", 0), torch.empty(0, dtype=torch.uint8, device="cpu")
        lane = partial(schedules.barrier_in_rounds, self._ranks)
        if way == "direct":
            lane = partial(schedules.all_to_all, self._ranks, [token] * self.size, [token] * self.size)
        return self._start("barrier", signature("barrier", way), [lane], 0)

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        lane = partial(schedules.messages, [(dst, tensor.view(-1))], [])
        number = self._message(self.rank, dst, tag)
        return self._start("send", signature("send"), [lane], tensor.nbytes, number=number, peer=dst)

    def _recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        lane = partial(schedules.messages, [], [(src, tensor.view(-1))])
        number = self._message(src, self.rank, tag)
        return self._start("recv", signature("send"), [lane], tensor.nbytes, number=number, peer=src)

    def _message(self, src: int, dst: int, tag: int) -> int:
        """Numbers messages between two ranks, those of each tag by themselves, so that they match in order."""
        count = self._messages[src, dst, tag] = self._messages.get((src, dst, tag), -1) + 1
        return _MESSAGE | (tag & 0x7FFFFFFF) << 32 | count & 0xFFFFFFFF


_ALL_REDUCE: dict[str, Callable[[Ranks, torch.Tensor, ReduceOp, Lane], Transfers]] = {
    "exchange": schedules.exchange,
    "doubling": schedules.doubling,
    "direct": schedules.direct,
    "halving": schedules.halving,
    "ring": schedules.ring,
}

_REDUCE_SCATTER = {
    "direct": schedules.reduce_scatter,
    "rounds": schedules.reduce_scatter_in_rounds,
    "ring": schedules.ring_reduce_scatter,
}

_open: weakref.WeakSet[StripedCommunicator] = weakref.WeakSet()


def _tell(count: weakref.WeakMethod[Any], nbytes: int) -> None:
    method = count()
    if method is not None:
        method(nbytes)
