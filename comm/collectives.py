"""The operations on tensors among a group of ranks: their checks, and what a backend implements of them."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

import torch

from bagua_kernels.comm.reduction import ReduceOp, check_reduction
from bagua_kernels.comm.work import FINISHED, Together, Work
from bagua_kernels.errors import CommunicationError


def check_tensor(operation: str, name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor detached from autograd, if an operation can send it or receive into it.

    Raises:
        TypeError: if it is not a tensor.
        ValueError: if it is not dense, contiguous and on `device`.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{operation} expects {name} to be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{operation} expects {name} to be dense, got {tensor.layout}: call to_dense()")
    if tensor.device != device:
        raise ValueError(f"{operation} expects {name} on {device}, got it on {tensor.device}: move it there")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{operation} expects {name} to be contiguous, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}: call contiguous(), resolve_conj() or resolve_neg()"
        )
    return tensor.detach() if tensor.requires_grad else tensor


class Collectives(abc.ABC):
    """The operations on tensors of a `Communicator`; see there for rules that all of them follow.

    A backend implements the methods with a leading underscore. Their arguments have been checked and detached from
    autograd; they are not empty, and there is more than one rank.
    """

    rank: int
    size: int
    device: torch.device

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Work:
        """Copies `tensor` of rank `src` into `tensor` of every rank."""
        tensor = self._enter("broadcast", "tensor", tensor)
        self._check_rank("src", src)
        return self._broadcast(tensor, src) if self.size > 1 and tensor.numel() else FINISHED

    def reduce(self, tensor: torch.Tensor, dst: int = 0, op: ReduceOp = ReduceOp.SUM) -> Work:
        """Leaves the reduction over all ranks in `tensor` of rank `dst`; the other ranks' tensors stay as they are."""
        tensor = self._enter("reduce", "tensor", tensor)
        self._check_rank("dst", dst)
        op = check_reduction(op, tensor.dtype)
        return self._reduce(tensor, dst, op) if self.size > 1 and tensor.numel() else FINISHED

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Work:
        """Replaces `tensor` of every rank by the reduction over all ranks; the result has the same bits everywhere."""
        tensor = self._enter("all_reduce", "tensor", tensor)
        op = check_reduction(op, tensor.dtype)
        return self._all_reduce(tensor, op) if self.size > 1 and tensor.numel() else FINISHED

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """Puts the inputs of all ranks, in rank order, into `output` of every rank (size x as many elements)."""
        output, input = self._enter_pair("all_gather", output, input, output_factor=self.size)
        if self.size == 1 or not input.numel():
            return self._identity(output, input)
        return self._all_gather(output, input)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Work:
        """Reduces over all ranks, and leaves part number `rank` of the result in `output` (of 1/size of the input)."""
        output, input = self._enter_pair("reduce_scatter", output, input, input_factor=self.size)
        op = check_reduction(op, input.dtype)
        if self.size == 1 or not input.numel():
            return self._identity(output, input)
        return self._reduce_scatter(output, input, op)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """Sends part r of `input` to rank r, and puts what rank r sent into part r of `output` (size equal parts)."""
        output, input = self._enter_pair("all_to_all", output, input)
        if input.numel() % self.size:
            raise ValueError(
                f"all_to_all expects a number of elements that {self.size=} divides, got {input.numel()=}: pad it, or "
                "use all_to_all_v"
            )
        if self.size == 1 or not input.numel():
            return self._identity(output, input)
        split = [input.numel() // self.size] * self.size
        return self._all_to_all(output, input, split, split)

    def all_to_all_v(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Work:
        """`all_to_all` with parts of the given numbers of elements.

        Args:
            output: receives `output_splits[r]` elements from rank r, one rank after the other.
            input: holds `input_splits[r]` elements for rank r, one rank after the other.
            output_splits: `size` numbers that sum to `output.numel()`.
            input_splits: `size` numbers that sum to `input.numel()`; entry r is rank r's `output_splits[rank]`.
        """
        output = self._enter("all_to_all_v", "output", output)
        input = self._enter("all_to_all_v", "input", input)
        self._check_dtypes("all_to_all_v", output, input)
        for name, splits, numel in (
            ("output_splits", output_splits, output.numel()),
            ("input_splits", input_splits, input.numel()),
        ):
            if len(splits) != self.size or min(splits) < 0 or sum(splits) != numel:
                raise ValueError(
                    f"all_to_all_v expects {name} to be {self.size} numbers >= 0 that sum to {numel} elements, got "
                    f"{list(splits)}"
                )
        if self.size == 1:
            if output.numel() != input.numel():
                raise ValueError(f"all_to_all_v with one rank expects {output.numel()=} to be {input.numel()=}")
            return self._identity(output, input)
        return self._all_to_all(output, input, list(output_splits), list(input_splits))

    def gather(self, input: torch.Tensor, output: torch.Tensor | None = None, dst: int = 0) -> Work:
        """Puts the inputs of all ranks, in rank order, into `output` of rank `dst`; the others pass no output."""
        self._check_rank("dst", dst)
        if self.rank != dst:
            input = self._enter("gather", "input", input)
            return self._gather(None, input, dst) if input.numel() else FINISHED
        if output is None:
            raise ValueError(
                f"gather on the destination rank {dst} expects an output of {self.size} x input.numel() elements"
            )
        output, input = self._enter_pair("gather", output, input, output_factor=self.size)
        if self.size == 1 or not input.numel():
            return self._identity(output, input)
        return self._gather(output, input, dst)

    def scatter(self, output: torch.Tensor, input: torch.Tensor | None = None, src: int = 0) -> Work:
        """Puts part r of rank `src`'s `input` into `output` of rank r; the others pass no input."""
        self._check_rank("src", src)
        if self.rank != src:
            output = self._enter("scatter", "output", output)
            return self._scatter(output, None, src) if output.numel() else FINISHED
        if input is None:
            raise ValueError(
                f"scatter on the source rank {src} expects an input of {self.size} x output.numel() elements"
            )
        output, input = self._enter_pair("scatter", output, input, input_factor=self.size)
        if self.size == 1 or not input.numel():
            return self._identity(output, input)
        return self._scatter(output, input, src)

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Work:
        """Sends `tensor` to rank `dst`, which calls `recv` with the same tag and number of elements."""
        tensor = self._enter("send", "tensor", tensor)
        self._check_peer("dst", dst, tag)
        return self._send(tensor, dst, tag) if tensor.numel() else FINISHED

    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> Work:
        """Receives into `tensor` what rank `src` sends with the same tag."""
        tensor = self._enter("recv", "tensor", tensor)
        self._check_peer("src", src, tag)
        return self._recv(tensor, src, tag) if tensor.numel() else FINISHED

    def neighbour_exchange(
        self, outputs: Mapping[int, torch.Tensor], inputs: Mapping[int, torch.Tensor], tag: int = 0
    ) -> Work:
        """Sends to some ranks and receives from some, all at once; ranks without neighbours need not take part.

        Args:
            outputs: for each rank to hear from, the tensor that receives what it sends to this rank.
            inputs: the tensor for each destination; several ranks may get the same tensor.
            tag: identifies an exchange among those under way.
        """
        self._check_usable()
        for name, tensors in (("outputs", outputs), ("inputs", inputs)):
            for peer in tensors:
                self._check_peer(name, peer, tag)
        outputs = {peer: self._enter("neighbour_exchange", "outputs", tensor) for peer, tensor in outputs.items()}
        inputs = {peer: self._enter("neighbour_exchange", "inputs", tensor) for peer, tensor in inputs.items()}
        outputs = {peer: tensor for peer, tensor in outputs.items() if tensor.numel()}
        inputs = {peer: tensor for peer, tensor in inputs.items() if tensor.numel()}
        return self._neighbour_exchange(outputs, inputs, tag) if outputs or inputs else FINISHED

    def barrier(self) -> Work:
        """Finishes once every rank has called it."""
        self._check_usable()
        return self._barrier() if self.size > 1 else FINISHED

    def _check_usable(self) -> None:
        reason = self._unusable()
        if reason:
            raise CommunicationError(f"this communicator cannot be used any more: {reason}")

    def _enter(self, operation: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Checks one tensor, and returns it detached from autograd."""
        self._check_usable()
        return check_tensor(operation, name, tensor, self.device)

    def _enter_pair(
        self, operation: str, output: torch.Tensor, input: torch.Tensor, output_factor: int = 1, input_factor: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output = self._enter(operation, "output", output)
        input = self._enter(operation, "input", input)
        self._check_dtypes(operation, output, input)
        if output.numel() * input_factor != input.numel() * output_factor:
            raise ValueError(
                f"{operation} with {self.size=} expects output.numel() * {input_factor} == input.numel() * "
                f"{output_factor}, got {output.numel()=} and {input.numel()=}"
            )
        return output, input

    def _check_dtypes(self, operation: str, output: torch.Tensor, input: torch.Tensor) -> None:
        if output.dtype != input.dtype:
            raise TypeError(f"{operation} expects one dtype, got {output.dtype=} and {input.dtype=}")

    def _check_rank(self, name: str, rank: int) -> None:
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise TypeError(f"expected {name} to be an int, got {rank!r}")
        if not 0 <= rank < self.size:
            raise ValueError(f"expected {name} to be a rank from 0 to {self.size - 1}, got {rank}")

    def _check_peer(self, name: str, rank: int, tag: int) -> None:
        self._check_rank(name, rank)
        if rank == self.rank:
            raise ValueError(f"expected {name} to be another rank, got this rank {rank}: copy the tensor instead")
        if not isinstance(tag, int) or not 0 <= tag < 1 << 31:
            raise ValueError(f"expected tag to be an int from 0 to 2^31 - 1, got {tag!r}")

    def _identity(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        # An output may be the input itself.
        if output.data_ptr() != input.data_ptr():
            output.view(-1).copy_(input.view(-1))
        return FINISHED

    @abc.abstractmethod
    def _unusable(self) -> str:
        """Returns why the communicator cannot be used, or an empty text."""

    @abc.abstractmethod
    def _broadcast(self, tensor: torch.Tensor, src: int) -> Work: ...

    @abc.abstractmethod
    def _reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp) -> Work: ...

    @abc.abstractmethod
    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work: ...

    @abc.abstractmethod
    def _all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work: ...

    @abc.abstractmethod
    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp) -> Work: ...

    @abc.abstractmethod
    def _all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Work: ...

    @abc.abstractmethod
    def _gather(self, output: torch.Tensor | None, input: torch.Tensor, dst: int) -> Work: ...

    @abc.abstractmethod
    def _scatter(self, output: torch.Tensor, input: torch.Tensor | None, src: int) -> Work: ...

    @abc.abstractmethod
    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work: ...

    @abc.abstractmethod
    def _recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work: ...

    @abc.abstractmethod
    def _barrier(self) -> Work: ...

    def _neighbour_exchange(self, outputs: dict[int, torch.Tensor], inputs: dict[int, torch.Tensor], tag: int) -> Work:
        receives = [self._recv(tensor, peer, tag) for peer, tensor in outputs.items()]
        return Together([*receives, *(self._send(tensor, peer, tag) for peer, tensor in inputs.items())])
