"""A handle for the host to wait for a stream of a GPU."""

from __future__ import annotations

import time
from datetime import timedelta

import torch

_PAUSE = 0.001  # seconds between two looks at the stream


class StreamEnd:
    """The end of the work that the current stream of a GPU holds at construction; it has the methods of torch's work.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def is_completed(self) -> bool:
        """Returns True if the GPU has done the work."""
        return bool(self._event.query())

    def wait(self, limit: timedelta) -> None:
        """Blocks the host until the GPU has done the work.

        Raises:
            RuntimeError: if the work takes longer than `limit`, or has failed.
        """
        deadline = time.monotonic() + limit.total_seconds()
        while not self._event.query():
            if time.monotonic() > deadline:
                raise RuntimeError("the stream still has work")
            time.sleep(_PAUSE)
