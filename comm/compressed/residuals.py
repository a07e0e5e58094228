"""What the payloads of one pass lacked, as one vector that outlives any cutting."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from bagua_kernels.compression import Codec, ErrorFeedback


class Kept(Protocol):
    """What the payloads of a vector lacked; see `Residuals`."""

    @property
    def numel(self) -> int: ...  # noqa: D102
    def reset(self) -> None: ...  # noqa: D102
    def scale(self, factor: float) -> None: ...  # noqa: D102
    def add(self, start: int, x: torch.Tensor) -> None: ...  # noqa: D102
    def withheld(self, spans: Sequence[tuple[int, int]]) -> AbstractContextManager[None]: ...  # noqa: D102
    def parts(self) -> list[torch.Tensor]: ...  # noqa: D102
    def norm(self) -> torch.Tensor: ...  # noqa: D102
    def state(self) -> torch.Tensor: ...  # noqa: D102
    def check(self, state: torch.Tensor) -> None: ...  # noqa: D102
    def load(self, state: torch.Tensor) -> None: ...  # noqa: D102


class Residuals:
    """Error feedback on the parts of a vector, each encoded by itself (Karimireddy et al., ICML 2019, algorithm 2).

    Args:
        codec: what encodes; an unbiased one is scaled by 1 / (1 + omega), see `ErrorFeedback`.
        parts: number and length of each part, in the order of their elements.
        device: where the vectors are.

    Raises:
        ValueError: the codec allows no error feedback.
    """

    def __init__(self, codec: Codec, parts: Sequence[tuple[int, int]], device: torch.device) -> None:
        self._feedback = ErrorFeedback(codec)
        self._parts = [(str(number), length) for number, length in parts if length]
        self._device = device
        self.reset()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(length for _, length in self._parts)

    def reset(self) -> None:
        """Sets all to zero."""
        self.load(torch.zeros(self.numel, dtype=torch.float32))

    def encode(
        self, number: int, x: torch.Tensor, *, seed: int, out: torch.Tensor, counts: torch.Tensor | None = None
    ) -> None:
        """Encodes a part and its residual into `out`, and keeps what that lacks; `counts` and errors as in `ErrorFeedback`."""
        self._feedback.encode(str(number), x, seed=seed, out=out, counts=counts)

    def scale(self, factor: float) -> None:
        """Multiplies all elements."""
        for part in self._views(0, self.numel):
            part.mul_(factor)

    def add(self, start: int, x: torch.Tensor) -> None:
        """Adds a vector to the elements from a place on."""
        done = 0
        for part in self._views(start, start + x.numel()):
            part.add_(x[done : done + part.numel()])
            done += part.numel()

    @contextlib.contextmanager
    def withheld(self, spans: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Within this block some elements, given by begin and end, are zero; afterwards they are what they were before."""
        parts = [part for begin, end in spans for part in self._views(begin, end)]
        kept = [part.clone() for part in parts]
        for part in parts:
            part.zero_()
        try:
            yield
        finally:
            for part, before in zip(parts, kept, strict=True):
                part.copy_(before)

    def _views(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """The elements from one place to another, part by part."""
        end = 0
        for name, length in self._parts:
            begin, end = end, end + length
            low, high = max(begin, start), min(end, stop)
            if low < high:
                like = torch.empty(length, dtype=torch.float32, device=self._device)
                yield self._feedback.residual(name, like)[low - begin : high - begin]

    def parts(self) -> list[torch.Tensor]:
        """The elements themselves, in pieces: what is written there is the residual."""
        return list(self._views(0, self.numel))

    def norm(self) -> torch.Tensor:
        """The Euclidean norm, a scalar tensor."""
        return self._feedback.norm()

    def state(self) -> torch.Tensor:
        """A copy, shape (n,), float32, in the order of the vector's elements."""
        named = self._feedback.state_dict()["residuals"]
        return torch.cat(
            [torch.empty(0, dtype=torch.float32, device=self._device), *(named[name] for name, _ in self._parts)]
        )

    def check(self, state: torch.Tensor) -> None:
        """Raises what `load` would, and takes nothing."""
        if state.shape != (self.numel,):
            raise ValueError(
                f"the residual has shape {tuple(state.shape)}, expected {(self.numel,)}: it belongs to a vector of another "
                "size, or, on the owner's side, to another number of ranks"
            )

    def load(self, state: torch.Tensor) -> None:
        """Takes what `state` gave, of whatever cutting.

        Raises:
            ValueError: it has another number of elements.
        """
        self.check(state)
        # waits: a checkpoint is loaded.
        parts = state.to(self._device, torch.float32).split([length for _, length in self._parts] or [0])
        named = {name: part for (name, _), part in zip(self._parts, parts, strict=False)}
        self._feedback.load_state_dict({"residuals": named})
        for name, part in named.items():
            self._feedback.residual(name, part)


def save(named: Mapping[str, Kept | None]) -> dict[str, torch.Tensor]:
    """The states of those residuals that there are."""
    return {name: residuals.state() for name, residuals in named.items() if residuals is not None}


def restore(named: Mapping[str, Kept | None], state: Mapping[str, torch.Tensor]) -> None:
    """Loads what `save` gave; what it lacks starts at zero again, and what there is no use for is dropped.

    Raises:
        ValueError: a residual has another number of elements; none is then loaded.
    """
    for name, residuals in named.items():
        if residuals is not None and name in state:
            residuals.check(state[name])
    for name, residuals in named.items():
        if residuals is None:
            continue
        if name in state:
            residuals.load(state[name])
        else:
            residuals.reset()
