"""What the payloads of one rank's shards lacked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from bagua_kernels.comm.compressed.residuals import Residuals


class ShardResiduals:
    """The residuals of those shards of a vector that this rank owns; of other elements it has none.

    A node of L of the P ranks encodes L N / P times the mean of its ranks. The exchange takes the mean of that over N nodes. An
    element's residual is thus a part of the vector that counts P / N times as much as the same element of one rank's vector.
    """

    def __init__(self, shards: Sequence[tuple[int, Residuals]]) -> None:
        """Takes the residuals.

        Args:
            shards: for each, where its first element is in the vector, and its residuals.
        """
        self._shards = list(shards)

    @property
    def numel(self) -> int:
        """Number of elements that have a residual."""
        return sum(kept.numel for _, kept in self._shards)

    def reset(self) -> None:
        """Sets all to zero."""
        for _, kept in self._shards:
            kept.reset()

    def scale(self, factor: float) -> None:
        """Multiplies all elements."""
        for _, kept in self._shards:
            kept.scale(factor)

    def add(self, start: int, x: torch.Tensor) -> None:
        """Adds a vector to the elements from a place of the vector on, as far as they have residuals."""
        for begin, kept in self._shards:
            first, last = max(start, begin), min(start + x.numel(), begin + kept.numel)
            if first < last:
                kept.add(first - begin, x[first - start : last - start])

    @contextlib.contextmanager
    def withheld(self, spans: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Within this block some elements of the vector, given by begin and end, are zero; afterwards they are as before."""
        with contextlib.ExitStack() as stack:
            for begin, kept in self._shards:
                stack.enter_context(kept.withheld([(max(0, first - begin), last - begin) for first, last in spans]))
            yield

    def parts(self) -> list[torch.Tensor]:
        """The elements themselves, in pieces: what is written there is the residual."""
        return [part for _, kept in self._shards for part in kept.parts()]

    def norm(self) -> torch.Tensor:
        """The Euclidean norm, a scalar tensor."""
        norms = [kept.norm() for _, kept in self._shards]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def state(self) -> torch.Tensor:
        """A copy, shape (numel,), float32, shard by shard."""
        parts = [kept.state() for _, kept in self._shards]
        # Not beside an empty tensor of the CPU: parts are on the device of the vector.
        return torch.cat(parts) if parts else torch.empty(0)

    def check(self, state: torch.Tensor) -> None:
        """Raises what `load` would, and takes nothing."""
        if state.shape != (self.numel,):
            raise ValueError(
                f"the residual has shape {tuple(state.shape)}, expected {(self.numel,)}: it belongs to a vector of another "
                "size, or to other nodes"
            )

    def load(self, state: torch.Tensor) -> None:
        """Takes what `state` gave.

        Raises:
            ValueError: it has another number of elements.
        """
        self.check(state)
        parts = state.split([kept.numel for _, kept in self._shards] or [0])
        for (_, kept), part in zip(self._shards, parts, strict=False):
            kept.load(part)
