"""Parameters that were frozen when a module was wrapped: they are compared once, and never exchanged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bagua_kernels.algorithms.wrapping.equal import agreements, differing, digest_of, digests
from bagua_kernels.algorithms.wrapping.replicas import synchronize
from bagua_kernels.algorithms.wrapping.sending import Sending
from bagua_kernels.bucket import dense_strides
from bagua_kernels.comm import Communicator
from bagua_kernels.comm.communicator import gather_json


def share_frozen(parameters: Sequence[tuple[str, torch.Tensor]], communicator: Communicator) -> None:
    """Gives all ranks the frozen parameters of rank 0, and sends only those whose bytes differ somewhere; collective.

    Where all are equal already, each rank sends three digests, and no parameter is written: a large base costs the reading of
    its memory. Bytes are compared and sent, not numbers, so that every dtype is served, quantized ones too.

    Args:
        parameters: with their names; the same names, shapes and dtypes on all ranks.
        communicator: of all ranks.

    Raises:
        ValueError: on all ranks, if parameters have other parts or scales of quantization than on another rank.
    """
    named = [(name, part) for name, parameter in parameters for part in _parts(parameter) if part.numel()]
    if communicator.size == 1 or not parameters:
        return
    forms = [f"{name} {_form(part)}" for name, part in named]
    strides = [dense_strides(part) for _, part in named]
    tensors = [_memory(part) for _, part in named]
    own = digests(tensors, communicator.device)
    texts = ["\n".join(forms), f"{strides}"]
    rows = [*(digest_of(text.encode(), communicator.device) for text in texts), own]
    alike, ordered, equal = agreements(rows, communicator)
    if not alike:
        _raise_difference(gather_json(communicator, forms))
    if ordered and equal:
        return
    if not ordered:
        # Memory in another order is not comparable: then bytes count in the order of elements.
        tensors = [part.detach() for _, part in named]
        own = digests(tensors, communicator.device)
    tensors = differing(tensors, own, communicator)
    with Sending("a frozen base", sum(tensor.nbytes for tensor in tensors), communicator):
        synchronize(tensors, communicator)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensors with memory of their own that make up a parameter: itself, or those inside a wrapper of tensors."""
    whole: Any = tensor
    if is_traceable_wrapper_subclass(whole):
        names, _ = whole.__tensor_flatten__()
        for name in names:
            yield from _parts(getattr(whole, name))
    else:
        yield tensor


def _form(part: torch.Tensor) -> str:
    """Returns what has to be equal on all ranks beside the bytes, as a text."""
    text = f"{tuple(part.shape)} {part.dtype}"
    if not part.is_quantized:
        return text
    if part.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"{text} scale={part.q_scale()!r} zero_point={part.q_zero_point()}"
    # waits: at start, for scales that a GPU has.
    scales, zeros = part.q_per_channel_scales().tolist(), part.q_per_channel_zero_points().tolist()
    return f"{text} axis={part.q_per_channel_axis()} {scales=} zero_points={zeros}"


def _memory(part: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor in the order of its memory, without a copy; itself where its memory has gaps."""
    if part.layout != torch.strided or dense_strides(part) != part.stride():
        return part.detach()
    size = part.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=part.device)
    flat.set_(part.untyped_storage(), part.storage_offset() * size, (part.numel() * size,), (1,))
    return flat


def _raise_difference(everyone: list[list[str]]) -> None:
    for rank, theirs in enumerate(everyone):
        for here, there in zip(everyone[0], theirs, strict=False):
            if here != there:
                raise ValueError(
                    f"frozen parameters differ between ranks: rank 0 has {here!r} where rank {rank} has {there!r}: load the "
                    "same base on all ranks"
                )
    counts = [len(theirs) for theirs in everyone]
    raise ValueError(
        f"frozen parameters differ between ranks, which have {counts} tensors: load the same base on all ranks"
    )


def check_frozen(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Raises if a parameter is trained that was frozen when the module was wrapped: replicas would drift apart.

    Args:
        parameters: those that were frozen, with their names.

    Raises:
        RuntimeError: one requires gradients now.
    """
    for name, parameter in parameters:
        if parameter.requires_grad:
            raise RuntimeError(
                f"parameter {name!r} was frozen when the module was wrapped, so that it is not exchanged: "
                "wrap the module again after requires_grad_(True), or wrap it before you freeze parameters"
            )
