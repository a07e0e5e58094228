"""A communicator whose other ranks hold what this rank holds, so that exchanges cost nothing but this rank's own work."""

from __future__ import annotations

import torch

from bagua_kernels.comm import Communicator, ReduceOp, Work
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.work import CLOSED, FINISHED


class Echo(Communicator):
    """Rank 0 of several ranks that are all alike; every operation is complete when it returns."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._assign(0, size, device, 60.0, Secret.random())
        self._reason = ""

    def abort(self, reason: str = "it was aborted") -> None:
        self._reason = self._reason or reason

    def close(self, limit: float | None = None) -> None:
        self._reason = self._reason or CLOSED

    def _unusable(self) -> str:
        return self._reason

    def _split(self, ranks: tuple[int, ...]) -> Communicator:
        return Echo(len(ranks), self.device)

    def _broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        return FINISHED

    def _reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp) -> Work:
        return self._all_reduce(tensor, op)

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        if op == ReduceOp.SUM:
            tensor.mul_(self.size)
        return FINISHED

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        output.view(self.size, -1).copy_(input.reshape(1, -1))
        return FINISHED

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp) -> Work:
        output.view(-1).copy_(input.reshape(self.size, -1)[0])
        return self._all_reduce(output, op)

    def _all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Work:
        mine = input.reshape(-1).split(input_splits)[0]
        torch.cat([mine] * self.size, out=output.view(-1))
        return FINISHED

    def _gather(self, output: torch.Tensor | None, input: torch.Tensor, dst: int) -> Work:
        return FINISHED if output is None else self._all_gather(output, input)

    def _scatter(self, output: torch.Tensor, input: torch.Tensor | None, src: int) -> Work:
        if input is not None:
            output.view(-1).copy_(input.reshape(self.size, -1)[0])
        return FINISHED

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        return FINISHED

    def _recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        return FINISHED

    def _barrier(self) -> Work:
        return FINISHED
