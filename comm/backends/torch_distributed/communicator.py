"""A communicator over torch.distributed: Gloo on a CPU, torch's NCCL on a GPU."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from bagua_kernels import knobs
from bagua_kernels.comm.backends.torch_distributed.gloo_bytes import bytes_through
from bagua_kernels.comm.backends.torch_distributed.group import Service, TorchGroup, group_beside
from bagua_kernels.comm.backends.torch_distributed.stream_end import StreamEnd
from bagua_kernels.comm.communicator import Communicator, checked_timeout
from bagua_kernels.comm.failures import liveness_store
from bagua_kernels.comm.failures.liveness import Liveness
from bagua_kernels.comm.failures.opening import connect
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.failures.session_work import SessionWork
from bagua_kernels.comm.joining.introduction import Introduction, job_secret
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.reduction import ReduceOp, divide_after, divide_first, reduce_in_order
from bagua_kernels.comm.work import Work

_NATIVE: dict[ReduceOp, Any] = {op: getattr(dist.ReduceOp, "SUM" if op is ReduceOp.AVG else op.name) for op in ReduceOp}
_MOVABLE = frozenset((torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.int8, torch.uint8))


class TorchCommunicator(Communicator):
    """The ranks of a torch process group.

    Over Gloo and NCCL it opens its own connections with its own timeout. Its operations thus never mix with other
    operations on the group. Ranks use the group only to find each other. Over any other backend it uses the
    group itself, and cannot be split. Making one is collective over the group.

    All ranks must issue their operations in one order, also when several are under way; a future's callback has no such
    order on Gloo. The result of a reduction is in the order of the backend's algorithm; all ranks get the same bits.
    On CUDA `wait` makes the current stream wait and does not block the host; only `close` does. Therefore torch's watchdog
    handles a lost rank, not this class. Tags are ignored there, and sends to one rank must be received in their order.

    `bytes_sent` counts as follows, for n ranks and b bytes per rank. all_reduce: 2(n-1)/n b. all_gather: (n-1) b.
    reduce_scatter: (n-1)/n b of the input. all_to_all: the bytes for other ranks. reduce: (n-1)/n b, and b/n more except
    at the destination. gather: b except at the destination. scatter: (n-1)/n b at the source. broadcast: b for each rank
    that this rank forwards it to (Gloo's binomial tree; a chain on NCCL). Reductions that the backend lacks (of int16, and
    bitwise ones on NCCL) gather everything: (n-1) b.

    Args:
        group: a torch process group; None for the default group.
        timeout: seconds after which an operation that does not finish raises an error; by default
            `BAGUA_KERNELS_TIMEOUT`.
        watch: True if the ranks send heartbeats, so that an error names the rank at fault: a thread and a connection to rank 0.
        device: where tensors will be; by default the current CUDA device if the group serves one, else the CPU.
        host: the address whose network interface Gloo uses; by default that of `GLOO_SOCKET_IFNAME`, or of the hostname.
        look: called again and again while this constructor waits for other ranks; what it raises ends the wait.
        connected: False to connect the ranks only for the first operation, and those of splits likewise. All ranks come to it
            in the same order. It costs descriptors and rounds, which a job does not need whose operations go another way.
        first: a value that the ranks exchange on the way; see `introduction`.

    Attributes:
        introduction: gathers values of all ranks without connections, until its deadline; of splits None.

    Raises:
        RankLostError: if a rank is lost meanwhile; it is named.
        CollectiveTimeoutError: if not all ranks call it in time.
        ValueError: if torch.distributed is not initialised, or the group serves no tensors on `device`.
    """

    introduction: Introduction | None
    _owned_liveness: Liveness | None
    _connected: bool
    _connecting: threading.Lock

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float | None = None,
        watch: bool = True,
        device: torch.device | None = None,
        host: str = "",
        look: Callable[[], object] | None = None,
        connected: bool = True,
        first: Any = None,
    ) -> None:
        if not dist.is_initialized():
            raise ValueError("TorchCommunicator needs torch.distributed: call bagua_kernels.comm.init() first")
        if group is None:
            group = dist.distributed_c10d._get_default_group()
        timeout = knobs.TIMEOUT.get() if timeout is None else checked_timeout(timeout)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise ValueError("TorchCommunicator expects a group of which this process is a member")
        service, deadline = Service.of(group, device), time.monotonic() + timeout
        left: Callable[[], float] = lambda: max(0.001, deadline - time.monotonic())  # noqa: E731
        secret = job_secret(_get_default_store(), left(), look)
        exchange = Introduction(group, secret, deadline, look, first)
        name = exchange.name
        liveness = None
        if watch and size > 1:
            liveness = liveness_store.connect(rank, size, exchange, exchange.secret, host, min(20.0, left() / 2))
        session = Session("world", timeout, rank, tuple(range(size)), liveness)
        try:
            beside = group_beside(service, _get_default_store(), name, rank, size, timeout, host)
            self._assemble(beside, session, name, exchange.secret.derive("communicator"))
            self._owned_liveness = liveness
            self.introduction = exchange
            if connected:
                with session.within(deadline):
                    self.connect(look)
        except BaseException as error:
            if liveness is not None:
                liveness.stop(f"it could not make its communicator: {error}")
            raise

    def connect(self, look: Callable[[], object] | None = None) -> None:
        """Connects the ranks, unless they are; all ranks call it, or start an operation.

        Args:
            look: called again and again meanwhile; what it raises ends the wait.

        Raises:
            RankLostError: if a rank is lost meanwhile; it is named.
            CollectiveTimeoutError: if not all ranks call it in time.
        """
        with self._connecting:
            if not self._connected:
                connect(self.session, self._group.open, look, TorchGroup.abandon)
                self._connected = True

    def _assemble(self, group: TorchGroup, session: Session, key: str, secret: Secret) -> None:
        self._assign(group.rank, group.size, group.device, group.timeout, secret)
        self._group = group
        self.session = session
        self.blocks = group.device.type != "cuda"
        self._key = key
        self._secret = secret
        self._owned_liveness = None
        self.introduction = None
        self._connected = group.backend is not None or group.size == 1
        self._connecting = threading.Lock()
        session.abandon = group.abandon
        if group.kind == "gloo":
            session.moves = partial(bytes_through, group.sockets.found)
        _open.add(self)

    def abort(self, reason: str = "it was aborted") -> None:
        """See `Communicator.abort`."""
        self.session.abort(reason)
        self._group.abandon()
        if self._owned_liveness is not None:
            self._owned_liveness.stop(reason)

    def close(self, limit: float | None = None) -> None:
        """See `Communicator.close`."""
        if self.session.ended:
            return
        self.session.hurry(limit)
        if self.size > 1 and self._connected:
            # A rank that closes its connections while others are still in an operation makes them fail.
            self.session.leaving = True
            self.barrier().wait()
            self._await_stream("close")
        self.session.close()
        self._group.close()
        if self._owned_liveness is not None:
            self._owned_liveness.stop("it closed its communicator")

    def drain(self) -> None:
        """See `Communicator.drain`."""
        self._check_usable()
        if self.size > 1:
            self._await_stream("drain")

    def _await_stream(self, operation: str) -> None:
        """Blocks the host, for an operation of a name, until the current stream has done what it has; it alone has waited."""
        if not self.blocks:
            SessionWork(self.session, StreamEnd(self.device), operation, None, None, None, None).wait()

    def set_timeout(self, seconds: float) -> None:
        """See `Communicator.set_timeout`."""
        self.timeout = self.session.timeout = checked_timeout(seconds)
        self._group.set_timeout(seconds)

    def give_up(self, reason: str) -> None:
        """Gives the connections up and makes every later call fail, without telling the other ranks."""
        self.session.ended = self.session.ended or reason
        self._group.abandon()

    def close_relatives(self) -> None:
        """See `Communicator.close_relatives`.

        Gloo's threads may still hold tensors a moment after an operation. Freeing the connections waits for them. A thread
        that released a tensor after the end of the interpreter would end the process with an abort.
        """
        for communicator in list(_open):
            if communicator.session.liveness is self.session.liveness and not communicator.session.ended:
                communicator.session.close()
                communicator._group.close()

    def _unusable(self) -> str:
        return self.session.ended

    def _split(self, ranks: tuple[int, ...]) -> TorchCommunicator:
        child = self.later(ranks)
        child.connect()
        return child

    def later(self, ranks: tuple[int, ...]) -> TorchCommunicator:
        """Returns a communicator of some of the ranks, which are connected for its first operation; see `_split`."""
        label = self._next_split(ranks)
        key = f"{self._key}/{label}"
        child = TorchCommunicator.__new__(TorchCommunicator)
        group = self._group.child(key, ranks)
        child._assemble(group, self.session.child(label, ranks), key, self._secret.derive("split", key))
        return child

    def _start(
        self,
        operation: str,
        call: Callable[[], Any],
        sent: int,
        finish: Callable[[], None] | None = None,
        peers: Sequence[int] | None = None,
    ) -> Work:
        """Issues one operation.

        Args:
            operation: its name.
            call: starts it, and returns torch's work.
            sent: bytes that it puts on the wire.
            finish: completes the outputs once it is done.
            peers: the other ranks that take part; None for a collective.
        """
        self.connect()
        number = self.session.enter(operation, self.call) if peers is None else None
        peer = peers[0] if peers is not None and len(peers) == 1 else None
        self.bytes_sent += sent
        handle = self.session.guard(operation, call, number, peer)
        device = self.device if self.device.type == "cuda" else None
        return SessionWork(self.session, handle, operation, number, peer, finish, device)

    def _broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = src
        data = _movable(tensor)
        sent = tensor.nbytes * self._group.broadcast_copies(src)
        return self._start("broadcast", lambda: self._group.backend.broadcast([data], options), sent)

    def _reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp) -> Work:
        n, b = self.size, tensor.nbytes
        if not self._group.reduces(tensor.dtype, op):
            return self._reduce_locally("reduce", tensor, op, keep=self.rank == dst)
        # Gloo uses the tensors of the other ranks as scratch memory.
        data = tensor if self.rank == dst else tensor.clone()
        divide_first(data, op, n)
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = _NATIVE[op], dst
        finish = divide_after(data, op, n) if self.rank == dst else None
        sent = (n - 1) * b // n + (0 if self.rank == dst else b // n)
        return self._start("reduce", lambda: self._group.backend.reduce([data], options), sent, finish)

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        if not self._group.reduces(tensor.dtype, op):
            return self._reduce_locally("all_reduce", tensor, op, keep=True)
        divide_first(tensor, op, self.size)
        options = dist.AllreduceOptions()
        options.reduceOp = _NATIVE[op]
        sent = 2 * (self.size - 1) * tensor.nbytes // self.size
        call = lambda: self._group.backend.allreduce([tensor], options)  # noqa: E731
        return self._start("all_reduce", call, sent, divide_after(tensor, op, self.size))

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        parts, data = _movable(output), _movable(input)
        sent = (self.size - 1) * input.nbytes
        return self._start("all_gather", lambda: self._group.backend._allgather_base(parts, data), sent)

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp) -> Work:
        # Gloo's own operation is a whole all-reduce, twice the bytes of this one.
        received = torch.empty_like(input).view(self.size, -1)
        data, parts = _bytes(input), _bytes(received)

        def finish() -> None:
            output.view(-1).copy_(reduce_in_order(received.unbind(0), op))

        call = lambda: self._group.backend.alltoall_base(parts, data, [], [])  # noqa: E731
        return self._start("reduce_scatter", call, (self.size - 1) * output.nbytes, finish)

    def _all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Work:
        width = input.itemsize
        into, out_of = [n * width for n in output_splits], [n * width for n in input_splits]
        parts, data = _bytes(output), _bytes(input)
        sent = input.nbytes - out_of[self.rank]
        return self._start("all_to_all", lambda: self._group.backend.alltoall_base(parts, data, into, out_of), sent)

    def _gather(self, output: torch.Tensor | None, input: torch.Tensor, dst: int) -> Work:
        options = dist.GatherOptions()
        options.rootRank = dst
        data = _bytes(input)
        parts = [] if output is None else [list(_bytes(output).view(self.size, -1).unbind(0))]
        sent = 0 if self.rank == dst else input.nbytes
        return self._start("gather", lambda: self._group.backend.gather(parts, [data], options), sent)

    def _scatter(self, output: torch.Tensor, input: torch.Tensor | None, src: int) -> Work:
        options = dist.ScatterOptions()
        options.rootRank = src
        data = _bytes(output)
        parts = [] if input is None else [list(_bytes(input).view(self.size, -1).unbind(0))]
        sent = 0 if input is None else input.nbytes - output.nbytes
        return self._start("scatter", lambda: self._group.backend.scatter([data], parts, options), sent)

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        data = _bytes(tensor)
        return self._start("send", lambda: self._group.send(data, dst, tag), tensor.nbytes, peers=[dst])

    def _recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        data = _bytes(tensor)
        return self._start("recv", lambda: self._group.recv(data, src, tag), 0, peers=[src])

    def _neighbour_exchange(self, outputs: dict[int, torch.Tensor], inputs: dict[int, torch.Tensor], tag: int) -> Work:
        if self._group.kind != "nccl":
            return super()._neighbour_exchange(outputs, inputs, tag)
        parts = {peer: _bytes(tensor) for peer, tensor in outputs.items()}
        mine = {peer: _bytes(tensor) for peer, tensor in inputs.items()}
        sent = sum(tensor.nbytes for tensor in inputs.values())
        call = lambda: self._group.exchange(parts, mine, tag)  # noqa: E731
        return self._start("neighbour_exchange", call, sent, peers=sorted({*parts, *mine}))

    def _barrier(self) -> Work:
        if self.device.type == "cuda":
            return self._start(
                "barrier",
                lambda: self._group.backend.allreduce([torch.zeros(1, dtype=torch.float32, device=self.device)]),
                0,
            )
        return self._start("barrier", lambda: self._group.backend.barrier(), 0)

    def _reduce_locally(self, operation: str, tensor: torch.Tensor, op: ReduceOp, keep: bool) -> Work:
        """Gathers everything and reduces it here, for reductions that the backend lacks."""
        everything = tensor.new_empty(self.size, tensor.numel())
        data, parts = _bytes(tensor), _bytes(everything)

        def finish() -> None:
            if keep:
                tensor.view(-1).copy_(reduce_in_order(everything.unbind(0), op))

        sent = (self.size - 1) * tensor.nbytes
        return self._start(operation, lambda: self._group.backend._allgather_base(parts, data), sent, finish)


_open: weakref.WeakSet[TorchCommunicator] = weakref.WeakSet()


@atexit.register
def _abandon_open() -> None:
    """Keeps a process that exits with operations under way from waiting for them."""
    for communicator in list(_open):
        if not communicator.is_ended():
            communicator._group.abandon()


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """Flattens a tensor; its elements become bytes unless every backend moves them as they are."""
    if tensor.dtype not in _MOVABLE:
        return _bytes(tensor)
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Views a tensor as bytes, which every backend moves, whatever the dtype."""
    # A tensor of one element is contiguous whatever its stride, but only a stride of 1 can be viewed as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
