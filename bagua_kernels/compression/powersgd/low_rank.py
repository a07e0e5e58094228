"""The two kinds of PowerSGD's states: both factors are made anew in each step, or one of them in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagua_kernels.compression.powersgd.orthonormal import orthonormalize
from bagua_kernels.compression.powersgd.stacks import gather, nonzero
from bagua_kernels.compression.powersgd.state import LowRankState
from bagua_kernels.launchers.low_rank import KEEP_LEFT, KEEP_RIGHT


class LowRank(LowRankState):
    """Residuals and factors of one rank, both made anew in each step; made by `PowerSGD.start`.

    A step is `left`, `right` and `finish`, with an average over all ranks after each of the first two; another order is a
    `RuntimeError`. Attributes are those of `LowRankState`.
    """

    @torch.no_grad()
    def left(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Adds the residuals and returns P = M Q of all compressed matrices.

        Args:
            tensors: all tensors, those in `dense` too, which are not looked at; float32, float16, bfloat16, or the state's
                dtype; any strides. They may be overwritten as soon as this returns.

        Returns:
            Shape (left_size,), of the state's dtype; overwritten by the next call. To be averaged over all ranks, in place.

        Raises:
            ValueError: the number of tensors, a shape, dtype or device does not fit.
        """
        self._check_tensors("tensors", tensors)
        stacks = self._stacks
        given = [[tensors[m.place] for m in s.matrices] for s in stacks.each]
        compiled = stacks.compiled(given)
        self._small = [False] * len(stacks.each)
        if stacks.passes is not None and compiled:
            for place, small in zip(compiled, stacks.passes.project(stacks.memory(), compiled, given), strict=True):
                self._small[place] = all(small)
        for place, (s, gradients) in enumerate(zip(stacks.each, given, strict=True)):
            if place not in compiled:
                stacks.add(place, gradients)
                torch.bmm(s.total, nonzero(s.kept, s.drawn), out=s.left)
            if not self._small[place]:
                stacks.spoil(place, s.left)
        self._next = "right"
        return stacks.left

    @torch.no_grad()
    def right(self, left: torch.Tensor) -> torch.Tensor:
        """Orthonormalises the averaged P and returns Q = M^T P.

        Args:
            left: shape (left_size,), the average over all ranks of what `left` returned, equal on all of them.

        Returns:
            Shape (right_size,), of the state's dtype; overwritten by the next call. To be averaged over all ranks, in place.
            Errors as in `left`.
        """
        stacks = self._stacks
        self._take("right", left, stacks.left)
        stacks.orthonormalize_left()
        if stacks.passes is not None:
            stacks.passes.gather(stacks.memory())
        else:
            for s in stacks.each:
                gather(s)
        self._next = "finish"
        return stacks.right


class AlternatingLowRank(LowRankState):
    """Residuals and factors of one rank, one of which is made anew in each step; made by `PowerSGD.start`.

    A step is `factor` and `finish`, with an average over all ranks between them; another order is a `RuntimeError`. Attributes
    are those of `LowRankState`.
    """

    _first = "factor"
    _calls = "`factor`, `finish`"

    def __init__(self, *arguments: Any) -> None:
        """See `LowRankState`."""
        super().__init__(*arguments)
        self._drawn_left = [torch.empty_like(s.kept_left) for s in self._stacks.each]
        self._fill(1, self._drawn_left)

    @torch.no_grad()
    def factor(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Adds the residuals and returns the factor whose turn it is, of all compressed matrices.

        In even steps it is P = M Q, with the Q of the step before, which becomes orthonormal now. In odd steps it is Q =
        M^T P, with the sides exchanged.

        Args:
            tensors: as for `LowRank.left`, with its errors.

        Returns:
            Shape (left_size,) or (right_size,), of the state's dtype; overwritten by the next call. To be averaged over all
            ranks, in place.
        """
        self._check_tensors("tensors", tensors)
        stacks = self._stacks
        given = [[tensors[m.place] for m in s.matrices] for s in stacks.each]
        compiled = stacks.compiled(given)
        self._small = [False] * len(stacks.each)
        left = self._keeps == KEEP_LEFT
        if left:
            for s in stacks.each:
                orthonormalize(s.right.copy_(nonzero(s.kept, s.drawn)))
        else:
            for s, drawn in zip(stacks.each, self._drawn_left, strict=True):
                s.left.copy_(nonzero(s.kept_left, drawn))
            stacks.orthonormalize_left()
        if stacks.passes is not None and compiled:
            work = stacks.passes.project_onto if left else stacks.passes.project_and_gather
            for place, small in zip(compiled, work(stacks.memory(), compiled, given), strict=True):
                self._small[place] = all(small)
        for place, (s, gradients) in enumerate(zip(stacks.each, given, strict=True)):
            if place not in compiled:
                stacks.add(place, gradients)
                if left:
                    torch.bmm(s.total, s.right, out=s.left)
                else:
                    gather(s)
            if not self._small[place]:
                stacks.spoil(place, s.left if left else s.right)
        self._next = "finish"
        return self._last

    @property
    def _last(self) -> torch.Tensor:
        return self._stacks.left if self._keeps == KEEP_LEFT else self._stacks.right

    @property
    def _keeps(self) -> int:
        return KEEP_RIGHT if self.step % 2 else KEEP_LEFT

    def _factors_to_save(self) -> dict[str, list[torch.Tensor]]:
        return {**super()._factors_to_save(), "lefts": [s.kept_left for s in self._stacks.each]}
