"""Less weight for pseudo-gradients that are too long: so that one rank's bad data does not harm all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bagua_kernels.options import FloatOrInf, check_fields


@dataclass(frozen=True)
class Penalty:
    """How the pseudo-gradients of a bucket are weighed by their norms (EDiT, Cheng et al., 2024, section 3.3).

    1. A rank whose norm is more than `threshold` standard deviations above its moving mean is left out of the round.
    2. Rank i's weight is exp(-|d_i|), divided by the sum of the weights of all ranks.
    3. If the norm of the mean is above `clip`, the mean is multiplied by clip / norm.

    If all ranks are left out, the round changes nothing, and parameters go back to where it began. A rank that is left out in
    `patience` rounds in a row takes part in the next one. Norms have risen for good then, as with a learning rate that rises. Its
    moving mean and variance become those of these rounds. Two norms are needed before any is judged.

    Attributes:
        threshold: of step 1, in standard deviations.
        smoothing: the weight of the last norm in the moving mean and variance, once enough rounds have been seen.
        warmup: rounds in which no rank is left out.
        clip: of step 3; None does not clip.
        patience: rounds in a row in which a rank is left out at most.
    """

    threshold: FloatOrInf = 3.0
    smoothing: float = 0.02
    warmup: int = 10
    clip: float | None = 10.0
    patience: int = 3

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            ValueError: one does not fit.
        """
        check_fields(self)
        if not self.threshold > 0 or not 0 < self.smoothing <= 1 or self.warmup < 0:
            raise ValueError(f"expected threshold > 0, smoothing above 0 and up to 1, warmup >= 0, got {self}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be above 0, or None, got {self.clip}")
        if self.patience < 1:
            raise ValueError(f"patience must be 1 round or more, got {self.patience}")


class Norms:
    """The moving mean and variance of this rank's norms of one bucket.

    Attributes:
        left_out: the number of norms for which this rank was left out.
        restarts: how often mean and variance began anew, because norms had risen for good.
    """

    def __init__(self, penalty: Penalty) -> None:
        """Begins without any."""
        self._penalty = penalty
        self._count, self._mean, self._variance = 0, 0.0, 0.0
        # What was left out since the last norm that was not.
        self._high: list[float] = []
        self.left_out = self.restarts = 0

    def judged(self, norm: float) -> float:
        """Returns a norm, or infinity if this rank is to be left out; what is not left out changes the moving mean.

        Args:
            norm: of this rank's pseudo-gradient.
        """
        if not math.isfinite(norm):
            self.left_out += 1
            return math.inf
        above = norm - self._mean > self._penalty.threshold * math.sqrt(self._variance)
        # One norm has no deviation.
        if above and self._count >= max(self._penalty.warmup, 2):
            if len(self._high) < self._penalty.patience:
                self._high.append(norm)
                self.left_out += 1
                return math.inf
            self.restarts += 1
            self._count, self._mean, self._variance = 0, 0.0, 0.0
            for each in self._high:
                self._take(each)
        self._high.clear()
        self._take(norm)
        return norm

    def _take(self, norm: float) -> None:
        self._count += 1
        # The plain mean and variance of the first norms, without an initial value, which would bias them.
        rate = max(self._penalty.smoothing, 1 / self._count)
        away = norm - self._mean
        self._mean += rate * away
        self._variance = (1 - rate) * (self._variance + rate * away * away)

    def numbers(self) -> dict[str, Any]:
        """Returns what a checkpoint contains of it."""
        return {"count": self._count, "mean": self._mean, "variance": self._variance, "high": list(self._high)}

    def load(self, numbers: Mapping[str, Any]) -> None:
        """Restores what `numbers` returned."""
        self._count, self._high = numbers["count"], list(numbers["high"])
        self._mean, self._variance = numbers["mean"], numbers["variance"]


def weights_of(norms: Sequence[float]) -> list[float]:
    """Returns exp(-norm) of each rank, all multiplied by what makes the largest 1; 0 for an infinite norm."""
    least = min(norms)
    return [0.0 if math.isinf(norm) else math.exp(least - norm) for norm in norms]


def clip_factor(norm: float, clip: float | None) -> float:
    """Returns what a mean of a norm is to be multiplied by."""
    return 1.0 if clip is None or norm <= clip else clip / norm
