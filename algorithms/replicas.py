"""Makes the replicas of a module equal on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bagua_kernels.bucket import dense_strides
from bagua_kernels.comm import Communicator, ReduceOp

_TOGETHER = 64 << 20  # bytes in one message


def check_module(module: torch.nn.Module, communicator: Communicator) -> None:
    """Raises, on all ranks, unless a module has the same parameters and buffers on all, on the communicator's device."""
    problems: list[tuple[type[Exception], str] | None] = communicator.all_gather_object(_problem(module, communicator))
    for kind, text in filter(None, [problems[communicator.rank], *problems]):
        raise kind(text)
    sparse = sparse_parameters(module)
    state = [*module.named_parameters(), *module.named_buffers()]
    own = [
        f"{name} {tuple(t.shape)} {t.dtype} trainable={t.requires_grad}"
        + (f" strides={dense_strides(t)} sparse={t in sparse}" if t.requires_grad else "")
        for name, t in state
    ]
    digest = hashlib.sha256("\n".join(own).encode()).hexdigest()
    if len(set(communicator.all_gather_object(digest))) == 1:
        return
    everyone: list[list[str]] = communicator.all_gather_object(own)
    for rank, theirs in enumerate(everyone):
        for here, there in zip(everyone[0], theirs, strict=False):
            if here != there:
                raise ValueError(f"modules differ between ranks: rank 0 has {here!r} where rank {rank} has {there!r}")
        if len(everyone[0]) != len(theirs):
            raise ValueError(
                f"modules differ between ranks: {len(everyone[0])} tensors on rank 0, {len(theirs)} on rank {rank}"
            )


def check_equal(options: Mapping[str, Any], communicator: Communicator) -> None:
    """Raises, on all ranks, unless options are the same on all."""
    everyone: list[Mapping[str, Any]] = communicator.all_gather_object(dict(options))
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0][name]:
                raise ValueError(
                    f"{name} differs between ranks: {everyone[0][name]!r} on rank 0, {value!r} on rank {rank}"
                )


def _problem(module: torch.nn.Module, communicator: Communicator) -> tuple[type[Exception], str] | None:
    for name, parameter in module.named_parameters():
        if parameter.device != communicator.device:
            text = f"parameter {name!r} is on {parameter.device}, expected {communicator.device}: move the module there first"
            return ValueError, text
        if parameter.requires_grad and not parameter.is_floating_point():
            return (
                TypeError,
                f"parameter {name!r} is {parameter.dtype}; trainable parameters must be real floating point",
            )
    return None


def sparse_parameters(module: torch.nn.Module) -> set[torch.Tensor]:
    """The weights of embeddings that make sparse gradients."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {part.weight for part in module.modules() if isinstance(part, kinds) and part.sparse}


def synchronize(tensors: Sequence[torch.Tensor], communicator: Communicator, src: int = 0) -> None:
    """Overwrites tensors with those of rank `src`, bit for bit, many in one message.

    Bytes are sent, not numbers: that serves every dtype and keeps NaN payloads and signs of zeros.
    """
    pending: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        pending.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= _TOGETHER:
            _broadcast_together(pending, communicator, src)
            pending, size = [], 0
    if size:
        _broadcast_together(pending, communicator, src)


@torch.no_grad()
def average(tensors: Sequence[torch.Tensor], communicator: Communicator) -> None:
    """Replaces tensors of floating point by their means over all ranks, and others by rank 0's; many in one message."""
    synchronize([t for t in tensors if not t.is_floating_point()], communicator)
    for dtype in sorted({t.dtype for t in tensors if t.is_floating_point()}, key=str):
        parts = [t for t in tensors if t.dtype == dtype]
        together = torch.cat([t.detach().reshape(-1) for t in parts])
        communicator.all_reduce(together, ReduceOp.AVG).wait()
        for tensor, mean in zip(parts, together.split([t.numel() for t in parts]), strict=True):
            tensor.copy_(mean.view(tensor.shape))


@torch.no_grad()
def _broadcast_together(tensors: Sequence[torch.Tensor], communicator: Communicator, src: int) -> None:
    parts = [_bytes(tensor) for tensor in tensors]
    together = torch.cat(parts)
    communicator.broadcast(together, src).wait()
    for tensor, part in zip(tensors, together.split([p.numel() for p in parts]), strict=True):
        # An odd number of bytes before it may leave the part unaligned for the tensor's dtype; a clone is aligned.
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
