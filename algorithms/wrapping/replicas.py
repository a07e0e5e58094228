"""Makes the replicas of a module equal on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from bagua_kernels.algorithms.wrapping.recorded import Recorded, differences
from bagua_kernels.bucket import dense_strides
from bagua_kernels.comm import Communicator, ReduceOp
from bagua_kernels.comm.communicator import gather_json

_TOGETHER = 64 << 20  # bytes that are put together
_AT_ONCE = 16 << 20  # bytes in one message


def check_replicas(
    module: torch.nn.Module,
    communicator: Communicator,
    kind: type,
    options: Recorded,
    excluded: frozenset[str],
    problem: str,
) -> None:
    """Raises, on all ranks, unless all have the same algorithm with the same options, and modules that fit; collective.

    One message contains all of it, as JSON.

    Args:
        module: whose parameters and buffers have the same names, shapes and dtypes on all ranks, on the communicator's device.
        communicator: of all ranks.
        kind: the algorithm's class.
        options: its arguments.
        excluded: the names of those that may differ.
        problem: why this rank refuses the module anyway; empty if it does not.

    Raises:
        TypeError: a trainable parameter is complex.
        ValueError: ranks differ, or some rank has a problem.
    """
    state = _described(module)
    own = {
        "problem": ["ValueError", problem] if problem else _problem(module, communicator),
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "options": options.described(excluded),
        "module": hashlib.sha256("\n".join(state).encode()).hexdigest(),
    }
    everyone = gather_json(communicator, own)
    for name, text in filter(None, [own["problem"], *(theirs["problem"] for theirs in everyone)]):
        raise (TypeError if name == "TypeError" else ValueError)(text)
    found = differences([[["", "the algorithm", {"": theirs["class"]}]] for theirs in everyone])
    found = found or differences([theirs["options"] for theirs in everyone])
    if found:
        raise ValueError(f"{'; '.join(found)}: make {kind.__name__} with the same options on all ranks")
    if len({theirs["module"] for theirs in everyone}) > 1:
        _tell_difference(gather_json(communicator, state))


def _described(module: torch.nn.Module) -> list[str]:
    sparse = sparse_parameters(module)
    return [
        f"{name} {tuple(t.shape)} {t.dtype} trainable={t.requires_grad}"
        + (f" strides={dense_strides(t)} sparse={t in sparse}" if t.requires_grad else "")
        for name, t in [*module.named_parameters(), *module.named_buffers()]
    ]


def _tell_difference(everyone: list[list[str]]) -> None:
    for rank, theirs in enumerate(everyone):
        for here, there in zip(everyone[0], theirs, strict=False):
            if here != there:
                raise ValueError(f"modules differ between ranks: rank 0 has {here!r} where rank {rank} has {there!r}")
        if len(everyone[0]) != len(theirs):
            raise ValueError(
                f"modules differ between ranks: {len(everyone[0])} tensors on rank 0, {len(theirs)} on rank {rank}"
            )


def _problem(module: torch.nn.Module, communicator: Communicator) -> list[str] | None:
    for name, parameter in module.named_parameters():
        if parameter.device != communicator.device:
            text = f"parameter {name!r} is on {parameter.device}, expected {communicator.device}: move the module there first"
            return ["ValueError", text]
        if parameter.requires_grad and not parameter.is_floating_point():
            return [
                "TypeError",
                f"parameter {name!r} is {parameter.dtype}; trainable parameters must be real floating point",
            ]
    return None


def sparse_parameters(module: torch.nn.Module) -> set[torch.Tensor]:
    """The weights of embeddings that make sparse gradients."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {part.weight for part in module.modules() if isinstance(part, kinds) and part.sparse}


Write = Callable[[torch.Tensor, torch.Tensor], object]
Give = Callable[[torch.Tensor], None]  # replaces bytes by those of one rank; collective


def synchronize(
    tensors: Sequence[torch.Tensor], communicator: Communicator, src: int = 0, write: Write = torch.Tensor.copy_
) -> None:
    """Overwrites tensors with those of rank `src`, bit for bit, many in one message; collective.

    Bytes are sent, not numbers: that serves every dtype and keeps NaN payloads and signs of zeros.

    Args:
        tensors: equal shapes and dtypes on all ranks; those of rank `src` are not written. They may be on the CPU or on the
            communicator's device, where each has the same type of device on all ranks.
        communicator: of all ranks.
        src: the rank whose values become everyone's.
        write: puts values, its second argument, into a tensor.
    """
    write_here = None if communicator.rank == src else write
    for kind in sorted({tensor.device.type for tensor in tensors}):
        alike = [tensor for tensor in tensors if tensor.device.type == kind]
        give_all(alike, partial(_broadcast, communicator, src), write_here)


def give_all(tensors: Sequence[torch.Tensor], give: Give, write: Write | None = torch.Tensor.copy_) -> None:
    """As `synchronize`, with a function that replaces bytes by those of one rank.

    Args:
        tensors: equal shapes and dtypes on all ranks, on one device.
        give: takes the bytes of many tensors; collective.
        write: puts values, its second argument, into a tensor; None where the tensors stay as they are.
    """
    for together in _in_messages(tensors, None):
        _give_together(together, give, write)


def _in_messages(tensors: Sequence[torch.Tensor], itemsize: int | None) -> Iterator[list[torch.Tensor]]:
    """Yields the tensors that have elements, as many at a time as are put together.

    Args:
        tensors: in the order in which they are sent.
        itemsize: bytes of an element as it is sent; None for those that it has.
    """
    pending: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        pending.append(tensor)
        size += tensor.numel() * (itemsize or tensor.element_size())
        if size >= _TOGETHER:
            yield pending
            pending, size = [], 0
    if pending:
        yield pending


def _broadcast(communicator: Communicator, src: int, data: torch.Tensor) -> None:
    # waits: for tensors of the CPU, which are sent at start and on demand.
    there = data.to(communicator.device)
    # A timeout counts for each piece, where it is not known how far a message is.
    for piece in there.split(_AT_ONCE):
        communicator.broadcast(piece, src).wait()
    if there is not data:
        data.copy_(there)


@torch.no_grad()
def average(tensors: Sequence[torch.Tensor], communicator: Communicator) -> None:
    """Replaces tensors of floating point by their means over all ranks, many in one message; collective.

    Means are computed in float32 at least, and rounded to the tensors' own dtype.

    Args:
        tensors: equal shapes and dtypes on all ranks, on any device.
        communicator: of all ranks.
    """
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        wide = torch.promote_types(dtype, torch.float32)
        for parts in _in_messages([t for t in tensors if t.dtype == dtype], wide.itemsize):
            # waits: means of states are taken on demand, or seldom.
            together = torch.cat([t.detach().reshape(-1).to(communicator.device, wide) for t in parts])
            communicator.all_reduce(together, ReduceOp.AVG).wait()
            for tensor, part in zip(parts, together.split([t.numel() for t in parts]), strict=True):
                tensor.copy_(part.view(tensor.shape))


@torch.no_grad()
def average_from_first(
    tensors: Sequence[torch.Tensor],
    mean: Callable[[torch.Tensor], None],
    give: Give,
    write: Write = torch.Tensor.copy_,
) -> None:
    """Replaces tensors of floating point by their means over all ranks, the same bits on all; many in one message.

    Where all ranks have the same bits, these stay: a sum of equal numbers, divided by their number, may be rounded to another
    one. So the mean is taken of what lies between a rank and the first one, in float64. Where the first one's number is not
    finite, it is the result.

    Args:
        tensors: equal shapes and dtypes on all ranks.
        mean: replaces a vector by its mean over ranks.
        give: replaces bytes by those of the first of these ranks.
        write: puts values, its second argument, into a tensor.
    """
    for dtype in sorted({t.dtype for t in tensors if t.numel()}, key=str):
        parts = [t for t in tensors if t.dtype == dtype and t.numel()]
        own = torch.cat([t.detach().reshape(-1) for t in parts])
        first = own.clone()
        give(bytes_of(first))
        wide, base = own.double(), first.double()
        same = (bytes_of(own) == bytes_of(first)).view(-1, own.element_size()).all(1)
        away = torch.where(same, 0.0, wide - base)
        mean(away)
        together = torch.where((away == 0) | ~base.isfinite(), first, (base + away).to(dtype))
        for tensor, part in zip(parts, together.split([t.numel() for t in parts]), strict=True):
            write(tensor, part.view(tensor.shape))


@torch.no_grad()
def _give_together(tensors: Sequence[torch.Tensor], give: Give, write: Write | None) -> None:
    parts = [bytes_of(tensor) for tensor in tensors]
    together = torch.cat(parts)
    give(together)
    if write is None:
        return
    for tensor, part in zip(tensors, together.split([p.numel() for p in parts]), strict=True):
        # An odd number of bytes before it may leave the part unaligned for the tensor's dtype; a clone is aligned.
        write(tensor, part.clone().view(tensor.dtype).view(tensor.shape))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes in the order of its elements, a view where that is possible."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
