"""Memory that more than one stream of a GPU uses."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def event_behind(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """An event behind the work of the current stream of a tensor's device; None on a CPU."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


def keep_memory(tensors: Iterable[torch.Tensor]) -> None:
    """Keeps the memory of tensors, once they are freed, until the current stream of their device has used them.

    PyTorch's allocator gives freed memory back to the stream that it was allocated on, which may use it again at once. Another
    stream that reads a tensor, and is the last to do so, therefore calls this function before the tensor is dropped.

    Args:
        tensors: on any device; those on a CPU are left alone.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
