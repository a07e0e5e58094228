"""Small arrays of the host on a device, without a wait of the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

# What CUDA graphs copy from at each replay, for as long as there may be one: a few kilobytes for each capture.
CAPTURED: list[torch.Tensor] = []


def uploaded(values: Any, device: torch.device) -> torch.Tensor:
    """Copies host memory to a device.

    A copy from ordinary memory waits for everything that the GPU has been given before. So the copy to a GPU is made from
    page-locked memory, which PyTorch's allocator keeps until the copy has been made.

    Args:
        values: a NumPy array, or a contiguous tensor on the CPU.
        device: where to.

    Returns:
        A tensor on the device; on a CPU it shares the memory of `values`.
    """
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    if device.type != "cuda":
        return tensor
    locked = tensor.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        CAPTURED.append(locked)
    return locked.to(device, non_blocking=True)


class Numbers:
    """A list of numbers on a device, which is copied there only when it changes."""

    def __init__(self, device: torch.device) -> None:
        """Begins without numbers."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._host: list[float] = []
        self._there = torch.empty(0, dtype=torch.float32, device=device)

    def of(self, numbers: Sequence[float]) -> torch.Tensor:
        """Returns the numbers as a float32 vector, to be read on the current stream and not to be written."""
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        if self._host != numbers or self._stream != stream:
            self._host, self._stream = list(numbers), stream
            self._there = uploaded(torch.tensor(self._host, dtype=torch.float32, device="cpu"), self._device)
        return self._there
