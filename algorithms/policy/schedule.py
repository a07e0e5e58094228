"""Which codec encodes the gradients of which parameter at which step."""

from __future__ import annotations

import fnmatch
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bagua_kernels.algorithms.policy.policy import Policy
from bagua_kernels.compression import Codec, PowerSGD, from_spec
from bagua_kernels.options import checked

Encoding = Codec | str | Mapping[int, Codec | str] | None
EXACT_DTYPES = (torch.float64,)


@dataclass(frozen=True)
class Schedule:
    """Codecs by step.

    Attributes:
        starts: the steps from which on each codec is used, ascending, the first of them 0; None stands for no compression.
    """

    starts: tuple[tuple[int, Codec | PowerSGD | None], ...]

    def at(self, step: int) -> Codec | PowerSGD | None:
        """The codec of a step."""
        return next(codec for start, codec in reversed(self.starts) if start <= step)

    @property
    def codecs(self) -> list[Codec]:
        """All of them."""
        return [codec for _, codec in self.starts if isinstance(codec, Codec)]

    @property
    def last_start(self) -> int:
        """The step from which on no codec changes any more."""
        return self.starts[-1][0]


class Scheduled(Policy):
    """Codecs by the schedules that are the buckets' kinds."""

    def __init__(self, last_start: int) -> None:
        """Knows from which step on no codec changes any more."""
        super().__init__()
        self._last_start = last_start

    def codec(self, kind: Hashable, step: int) -> Any:
        """See `Policy.codec`."""
        return kind.at(step) if isinstance(kind, Schedule) else None

    def is_lasting(self, step: int) -> bool:
        """See `Policy.is_lasting`."""
        return step >= self._last_start


@checked
def schedule(encoding: Encoding, warmup_steps: int = 0) -> Schedule:
    """Makes a schedule.

    Args:
        encoding: a codec, its spec, None, or any of these by the step from which on it is used.
        warmup_steps: steps without compression at the beginning.

    Raises:
        ValueError: a step is negative, a spec names no codec, or `warmup_steps` is negative.
        TypeError: a value that should be a codec is not one.
    """
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be 0 or more, got {warmup_steps}")
    given = dict(encoding) if isinstance(encoding, Mapping) else {0: encoding}
    for start in given:
        if not isinstance(start, int) or isinstance(start, bool) or start < 0:
            raise ValueError(f"codecs are given by the step from which on they are used, 0 or more, got {start!r}")
    codecs = {start: _codec(given[start]) for start in sorted(given)}
    starts: dict[int, Codec | None] = {0: None}
    for start, codec in codecs.items():
        starts[max(start, warmup_steps)] = codec
    if len(starts) > 1 and min(codecs) <= 0 and not warmup_steps:
        starts[0] = codecs[0]
    return Schedule(tuple(sorted(starts.items(), key=lambda item: item[0])))


def _codec(given: Codec | str | None) -> Codec | None:
    if isinstance(given, str):
        return from_spec(given)
    if given is not None and not isinstance(given, Codec):
        raise TypeError(f"expected a codec, the spec of one, or None, got {given!r}")
    return given


@dataclass(frozen=True)
class Assignment:
    """How each parameter's gradient is sent.

    Attributes:
        default: of most parameters.
        groups: patterns of parameters' names, as in file names, and the schedule of those that match; the first match counts.
        exact: patterns of the names of parameters that are averaged without compression in the same message; "1d" stands for
            all that have fewer than two dimensions.
        min_numel: parameters with fewer elements are exact too.
    """

    default: Schedule
    groups: tuple[tuple[str, Schedule], ...] = ()
    exact: tuple[str, ...] = ()
    min_numel: int = 0

    @classmethod
    def make(
        cls,
        encoding: Encoding,
        warmup_steps: int = 0,
        groups: Mapping[str, Encoding] | None = None,
        exact: str | tuple[str, ...] | list[str] = (),
        min_numel: int = 0,
    ) -> Assignment:
        """Makes one of what a user writes; errors as of `schedule`."""
        if min_numel < 0:
            raise ValueError(f"min_numel must be 0 or more, got {min_numel}")
        return cls(
            schedule(encoding, warmup_steps),
            tuple((pattern, schedule(codec, warmup_steps)) for pattern, codec in (groups or {}).items()),
            (exact,) if isinstance(exact, str) else tuple(exact),
            min_numel,
        )

    def place(self, name: str, parameter: torch.Tensor) -> tuple[Schedule, bool]:
        """Returns a parameter's schedule, and whether it is exact."""
        found = next((s for pattern, s in self.groups if fnmatch.fnmatchcase(name, pattern)), self.default)
        exact = (
            parameter.dtype in EXACT_DTYPES
            or parameter.numel() < self.min_numel
            or any((p == "1d" and parameter.dim() < 2) or fnmatch.fnmatchcase(name, p) for p in self.exact)
        )
        return found, exact

    @property
    def schedules(self) -> dict[str, Schedule]:
        """All schedules by pattern; the default's is empty."""
        return {"": self.default, **dict(self.groups)}

    @property
    def codecs(self) -> list[Codec]:
        """All that are used at some step; those of most parameters first."""
        return [codec for s in self.schedules.values() for codec in s.codecs]

    @property
    def last_start(self) -> int:
        """The step from which on no codec changes any more."""
        return max(schedule.last_start for schedule in self.schedules.values())

    def alignment(self) -> int:
        """The least number of elements that whole blocks of all its codecs make up; blocks are powers of two."""
        return max((codec.block for codec in self.codecs), default=1)
