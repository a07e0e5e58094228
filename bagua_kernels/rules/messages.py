"""Rules over several arrays around a codec: what is encoded of them, and what the decoded value changes in them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bagua_kernels.rules.calls import called_rules
from bagua_kernels.rules.feedback import compensated, remainder


@dataclass(frozen=True)
class MessageRule:
    """What a codec encodes, as a rule over several arrays of one length; `bagua_kernels.launchers.blockwise.fusion` runs it.

    The three stages of each element are:

    1. `before` computes new values of some arrays. They are stored, and the next stages get them as they are in memory:
       rounded to the dtype of their array.
    2. `value` computes the float32 that is encoded.
    3. `after` gets what the payload decodes to, and computes new values of some arrays. They are stored.

    Attributes:
        name: lower-case identifier.
        value: (one value of each array, then scalars) -> the float32 that is encoded.
        arrays: number of arrays.
        before: (one value of each array, then scalars) -> new values of the arrays in `before_writes`: a tuple, or the value
            itself if there is one. None if nothing is written before.
        before_writes: the positions of the arrays that `before` writes, ascending.
        after: (decoded value, one value of each array, then scalars) -> new values of the arrays in `after_writes`, as for
            `before`. None if nothing is written after.
        after_writes: the positions of the arrays that `after` writes, ascending.
    """

    name: str
    value: Callable[..., Any]
    arrays: int
    before: Callable[..., Any] | None = None
    before_writes: tuple[int, ...] = ()
    after: Callable[..., Any] | None = None
    after_writes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, function, writes in (
            ("before", self.before, self.before_writes),
            ("after", self.after, self.after_writes),
        ):
            if (function is None) != (not writes) or list(writes) != sorted({*writes} & {*range(self.arrays)}):
                raise ValueError(
                    f"{name}_writes of rule {self.name!r} must be ascending positions below {self.arrays}, and empty only "
                    f"without `{name}`, got {writes}"
                )
        counts = [
            len(inspect.signature(function).parameters) - extra
            for function, extra in ((self.value, 0), (self.before, 0), (self.after, 1))
            if function is not None
        ]
        if len(set(counts)) > 1 or counts[0] < self.arrays:
            raise ValueError(
                f"the functions of rule {self.name!r} must take {self.arrays} arrays and the same scalars, `after` the decoded "
                f"value before them; got {counts} arguments beside it"
            )
        for function in (self.value, self.before, self.after):
            if function is not None:
                called_rules(function)

    @functools.cached_property
    def scalars(self) -> int:
        """Number of scalars."""
        return len(inspect.signature(self.value).parameters) - self.arrays


def scaled_total(x, residual, factor):
    """What error feedback sends: the value and what earlier payloads lacked, times a factor."""
    return compensated(x, residual) * factor


def lacking(sent, x, residual, factor):
    """What the payload lacks of the value and the residual."""
    return remainder(compensated(x, residual), sent, residual)


# Error feedback: (x, residual; factor).
FEEDBACK = MessageRule("feedback", scaled_total, 2, after=lacking, after_writes=(1,))
