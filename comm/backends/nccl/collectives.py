"""The collectives of NCCL, and those that are made of others because NCCL lacks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from bagua_kernels.comm.backends.nccl import binding as nccl_binding
from bagua_kernels.comm.backends.nccl.binding import Endpoint
from bagua_kernels.comm.backends.nccl.queue import OperationQueue
from bagua_kernels.comm.backends.nccl.work import NcclWork, Ticket
from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.reduction import HALF, ReduceOp, divide_after, reduce_in_order
from bagua_kernels.comm.work import Work
from bagua_kernels.quotient import divided

_Finish = Callable[[], None] | None


class NcclCollectives(Communicator):
    """The operations that a communicator over NCCL puts on its stream; see `NcclCommunicator`.

    Attributes:
        session: shared by all operations.
    """

    session: Session
    _queue: OperationQueue
    _token: torch.Tensor

    def _start(
        self,
        operation: str,
        issue: Callable[[Endpoint], None],
        sent: int,
        tensors: list[torch.Tensor],
        finish: _Finish = None,
        peers: Sequence[int] | None = None,
    ) -> NcclWork:
        """Issues one operation.

        Args:
            operation: its name.
            issue: puts it on the stream.
            sent: bytes that it puts on the wire.
            tensors: all that it reads and writes.
            finish: completes the outputs once it is done.
            peers: the other ranks that take part; None for all of them, in a collective.
        """
        self._queue.issue_queued()
        number = self.session.enter(operation, self.call) if peers is None else None
        self.bytes_sent += sent
        ticket = Ticket(operation, number, tuple(peers or ()))
        return self._queue.start(ticket, issue, tensors, finish)

    def _broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        sent = 0 if (self.rank - src) % self.size == self.size - 1 else tensor.nbytes
        return self._start("broadcast", lambda nccl: nccl.broadcast(tensor, src), sent, [tensor])

    def _reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp) -> Work:
        n, b, here = self.size, tensor.nbytes, self.rank == dst
        if not nccl_binding.reduces(tensor.dtype, op):
            everything = tensor.new_empty(n, tensor.numel()) if here else None
            finish = None if everything is None else self._reduce_into(tensor, everything, op)
            return self._collect("reduce", everything, tensor, dst, finish)
        data = self._divided(tensor, op, tensor if here else None)
        sent = (n - 1) * b // n + (0 if here else b // n)
        finish = divide_after(data, op, self.size) if here else None
        return self._start("reduce", lambda nccl: nccl.reduce(data, op, dst, receives=here), sent, [data], finish)

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        if not nccl_binding.reduces(tensor.dtype, op):
            everything, sent = tensor.new_empty(self.size, tensor.numel()), (self.size - 1) * tensor.nbytes
            total = self._reduce_into(tensor, everything, op)
            issue = lambda nccl: nccl.all_gather(everything, tensor)  # noqa: E731
            return self._start("all_reduce", issue, sent, [everything, tensor], total)
        self._divided(tensor, op, tensor)
        sent = 2 * (self.size - 1) * tensor.nbytes // self.size
        finish = divide_after(tensor, op, self.size)
        return self._start("all_reduce", lambda nccl: nccl.all_reduce(tensor, op), sent, [tensor], finish)

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        sent = (self.size - 1) * input.nbytes
        return self._start("all_gather", lambda nccl: nccl.all_gather(output, input), sent, [output, input])

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp) -> Work:
        sent = (self.size - 1) * output.nbytes
        if not nccl_binding.reduces(input.dtype, op):
            received = torch.empty_like(input).view(self.size, -1)
            parts, mine = _by_rank(received.unbind(0)), _by_rank(input.view(self.size, -1).unbind(0))
            total, tensors = self._reduce_into(output, received, op), [received, input]
            return self._start("reduce_scatter", lambda nccl: nccl.exchange(parts, mine), sent, tensors, total)
        data, finish = self._divided(input, op), divide_after(output, op, self.size)
        issue = lambda nccl: nccl.reduce_scatter(output, data, op)  # noqa: E731
        return self._start("reduce_scatter", issue, sent, [output, data], finish)

    def _all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Work:
        parts, mine = _by_rank(output.view(-1).split(output_splits)), _by_rank(input.view(-1).split(input_splits))
        sent = (input.numel() - input_splits[self.rank]) * input.itemsize
        return self._start("all_to_all", lambda nccl: nccl.exchange(parts, mine), sent, [output, input])

    def _gather(self, output: torch.Tensor | None, input: torch.Tensor, dst: int) -> Work:
        return self._collect("gather", output, input, dst)

    def _collect(
        self, operation: str, output: torch.Tensor | None, input: torch.Tensor, dst: int, finish: _Finish = None
    ) -> Work:
        """Puts the inputs of all ranks, in rank order, into the output of rank `dst`, which alone has one."""
        parts = {} if output is None else _by_rank(output.view(self.size, -1).unbind(0))
        tensors = [input] if output is None else [output, input]
        sent = input.nbytes if output is None else 0
        return self._start(operation, lambda nccl: nccl.exchange(parts, {dst: [input]}), sent, tensors, finish)

    def _scatter(self, output: torch.Tensor, input: torch.Tensor | None, src: int) -> Work:
        parts = {} if input is None else _by_rank(input.view(self.size, -1).unbind(0))
        tensors = [output] if input is None else [output, input]
        sent = 0 if input is None else input.nbytes - output.nbytes
        return self._start("scatter", lambda nccl: nccl.exchange({src: [output]}, parts), sent, tensors)

    def _neighbour_exchange(self, outputs: dict[int, torch.Tensor], inputs: dict[int, torch.Tensor], tag: int) -> Work:
        parts, mine = _by_rank(outputs), _by_rank(inputs)
        sent = sum(tensor.nbytes for tensor in inputs.values())
        peers, tensors = sorted({*outputs, *inputs}), [*outputs.values(), *inputs.values()]
        issue = lambda nccl: nccl.exchange(parts, mine)  # noqa: E731
        return self._start("neighbour_exchange", issue, sent, tensors, peers=peers)

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        self.bytes_sent += tensor.nbytes
        return self._queue.queue("send", dst, tensor, tag)

    def _recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        return self._queue.queue("recv", src, tensor, tag)

    def _barrier(self) -> NcclWork:
        return self._start("barrier", lambda nccl: nccl.all_reduce(self._token, ReduceOp.MAX), 0, [self._token])

    def _reduce_into(self, output: torch.Tensor, parts: torch.Tensor, op: ReduceOp) -> Callable[[], None]:
        def finish() -> None:
            output.view(-1).copy_(reduce_in_order(parts.unbind(0), op))

        return finish

    def _divided(self, tensor: torch.Tensor, op: ReduceOp, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns what goes into the sum: a new tensor, or `out`, where halves are averaged, else the tensor itself."""
        return divided(tensor, self.size, out=out) if op is ReduceOp.AVG and tensor.dtype in HALF else tensor


def _by_rank(tensors: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    return {rank: [one] for rank, one in (tensors.items() if isinstance(tensors, Mapping) else enumerate(tensors))}
