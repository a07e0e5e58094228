"""What a fused step can do in its one pass beside the update itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from bagua_kernels.options import check_fields
from bagua_kernels.suggestions import did_you_mean

Precision = Literal["nearest", "stochastic", "master", "kahan"]


@dataclass(frozen=True)
class Extras:
    """Options of every fused optimizer that `torch.optim` does not have.

    For bfloat16 and float16 parameters arithmetic is in float32 with any options. The options decide about the digits that the
    parameter cannot hold. They do not change float32 and float64 parameters.

    Attributes:
        precision: "nearest" rounds, and loses updates smaller than half of a parameter's last digit. "stochastic" rounds up
            or down at random, without bias (bfloat16 only; no memory). "master" keeps a float32 copy of each parameter in
            its state "master" (4 bytes). "kahan" keeps what was lost in the state "compensation" (2 bytes).
        average: decay of a running mean of the parameters, `mean * average + parameter * (1 - average)`, in the state "average"
            (float32, or float64 for float64 parameters); None for no mean.
        seed: of stochastic rounding. Replicas of one parameter must have the same.
    """

    precision: Precision = "nearest"
    average: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.precision not in get_args(Precision):
            raise ValueError(
                f"precision must be one of {', '.join(get_args(Precision))}, got {self.precision!r}"
                f"{did_you_mean(self.precision, get_args(Precision))}"
            )
        if self.average is not None and not 0.0 <= self.average < 1.0:
            raise ValueError(f"average must be None or a decay in [0, 1), got {self.average}")
