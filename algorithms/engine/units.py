"""In which units residuals are, where losses are scaled."""

from __future__ import annotations

import torch


class Units:
    """The scale of the gradients of which something is remembered, for each bucket; 1 for what was remembered without scale.

    Scales are powers of two unless a user says otherwise, so that changing the unit rounds nothing.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, apply_in_backward: bool = False) -> None:
        if scaler is not None and apply_in_backward:
            raise ValueError("a scaler looks at all gradients before its step: leave out apply_in_backward, or scaler")
        self._scaler = scaler
        self._scales: dict[int, float] = {}

    def scale(self) -> float:
        """What gradients are multiplied by now."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def of(self, index: int) -> float:
        """What those were multiplied by of which something is remembered."""
        return self._scales.get(index, 1.0)

    def change(self, index: int) -> float:
        """Goes over to the scale of now; returns by what all that is remembered of a bucket is to be multiplied."""
        before, self._scales[index] = self.of(index), self.scale()
        return self._scales[index] / before

    def forget(self) -> None:
        """Drops what is kept by the number of a bucket."""
        self._scales.clear()
