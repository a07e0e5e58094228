"""PowerSGD: a matrix is sent as two thin factors, made by one step of subspace iteration; linear, with error feedback.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019, algorithms 1 and 2; `docs/powersgd.md` has the formulas. Nothing here communicates: the caller averages the factors over
the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua_kernels.compression.codec import MASK
from bagua_kernels.compression.powersgd.low_rank import LowRankState, Stack
from bagua_kernels.compression.powersgd.orthonormal import orthonormalize
from bagua_kernels.launchers.low_rank import KEEP_LEFT, KEEP_RIGHT


@dataclass(frozen=True)
class PowerSGD:
    """The configuration of PowerSGD; equal on all ranks.

    Attributes:
        rank: columns of a factor, 1 or more; at most the lesser side of a matrix is used. The paper uses 1 to 4.
        seed: of the first right factors, 0 to 2**64 - 1.
        min_compression: a matrix is compressed if its factors are at least this many times smaller than itself. 0
            compresses every matrix.
        warm_start: begin each step with the right factors of the last (paper, section 3), instead of with new random ones.
        alternate: make only one of the factors anew in each step, in turn, as the library of the paper's authors does: half
            of the messages, their bytes and the passes over matrices, of an iteration that takes two steps.

    Raises:
        ValueError: an attribute is out of its range, or steps that alternate begin with random factors.
    """

    rank: int = 1
    seed: int = 0
    min_compression: float = 2.0
    warm_start: bool = True
    alternate: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}; 1 compresses most")
        if not 0 <= self.seed <= MASK:
            raise ValueError(f"seed must be from 0 to 2**64 - 1, got {self.seed}")
        if not 0 <= self.min_compression < math.inf:
            raise ValueError(
                f"min_compression must be finite and 0 (compresses all) or more, got {self.min_compression}"
            )
        if self.alternate and not self.warm_start:
            raise ValueError(
                "alternate=True got warm_start=False: a step that makes one factor would project onto random numbers; "
                "leave warm_start on"
            )

    def start(
        self,
        shapes: Iterable[Sequence[int]],
        names: Iterable[str] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> LowRank | AlternatingLowRank:
        """Makes the state of a list of tensors, with residuals of zero.

        Args:
            shapes: of the tensors, in the same order on all ranks.
            names: of the tensors, all different and equal on all ranks; they tell random numbers and saved states apart.
                "0", "1", … if None.
            dtype: of residuals, factors and arithmetic, float32 or float64.
            device: of the tensors.

        Raises:
            ValueError: the names are too few, too many or not all different, or the dtype is another.
        """
        sizes = [torch.Size(shape) for shape in shapes]
        labels = [str(i) for i in range(len(sizes))] if names is None else list(names)
        kind = AlternatingLowRank if self.alternate else LowRank
        return kind(self, sizes, labels, dtype, torch.device(device))


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
        given = [[tensors[m.place] for m in s.matrices] for s in self._stacks]
        compiled = self._compiled(given)
        self._small = [False] * len(self._stacks)
        if self._passes is not None and compiled:
            for place, small in zip(compiled, self._passes.project(self._memory(), compiled, given), strict=True):
                self._small[place] = all(small)
        for place, (s, gradients) in enumerate(zip(self._stacks, given, strict=True)):
            if place not in compiled:
                self._add(place, gradients)
                torch.bmm(s.total, nonzero(s.kept, s.drawn), out=s.left)
            self._spoil(place, s.left)
        self._next = "right"
        return self._left

    @torch.no_grad()
    def right(self, left: torch.Tensor) -> torch.Tensor:
        """Orthonormalises the averaged P and returns Q = M^T P.

        Args:
            left: shape (left_size,), the average over all ranks of what `left` returned, equal on all of them.

        Returns:
            Shape (right_size,), of the state's dtype; overwritten by the next call. To be averaged over all ranks, in place.
            Errors as in `left`.
        """
        self._take("right", left, self._left)
        self._orthonormalize_left()
        if self._passes is not None:
            self._passes.gather(self._memory())
        else:
            for s in self._stacks:
                gather(s)
        self._next = "finish"
        return self._right


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
        self._drawn_left = [torch.empty_like(s.kept_left) for s in self._stacks]
        self._fill(1, self._drawn_left)

    @torch.no_grad()
    def factor(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Adds the residuals and returns the factor whose turn it is, of all compressed matrices.

        In steps of an even number it is P = M Q, of Q that was made in the step before and is made orthonormal now, in the others
        Q = M^T P, with the sides exchanged.

        Args:
            tensors: as for `LowRank.left`, with its errors.

        Returns:
            Shape (left_size,) or (right_size,), of the state's dtype; overwritten by the next call. To be averaged over all
            ranks, in place.
        """
        self._check_tensors("tensors", tensors)
        given = [[tensors[m.place] for m in s.matrices] for s in self._stacks]
        compiled = self._compiled(given)
        self._small = [False] * len(self._stacks)
        left = self._keeps == KEEP_LEFT
        if left:
            for s in self._stacks:
                orthonormalize(s.right.copy_(nonzero(s.kept, s.drawn)))
        else:
            for s, drawn in zip(self._stacks, self._drawn_left, strict=True):
                s.left.copy_(nonzero(s.kept_left, drawn))
            self._orthonormalize_left()
        if self._passes is not None and compiled:
            work = self._passes.project_onto if left else self._passes.project_and_gather
            for place, small in zip(compiled, work(self._memory(), compiled, given), strict=True):
                self._small[place] = all(small)
        for place, (s, gradients) in enumerate(zip(self._stacks, given, strict=True)):
            if place not in compiled:
                self._add(place, gradients)
                if left:
                    torch.bmm(s.total, s.right, out=s.left)
                else:
                    gather(s)
            self._spoil(place, s.left if left else s.right)
        self._next = "finish"
        return self._last

    @property
    def _last(self) -> torch.Tensor:
        return self._left if self._keeps == KEEP_LEFT else self._right

    @property
    def _keeps(self) -> int:
        return KEEP_RIGHT if self.step % 2 else KEEP_LEFT

    def _factors_to_save(self) -> dict[str, list[torch.Tensor]]:
        return {**super()._factors_to_save(), "lefts": [s.kept_left for s in self._stacks]}


def nonzero(kept: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Factors of a stack, with columns of random numbers in place of those of zeros."""
    # A column that became zero would stay zero whatever gradients come.
    return torch.where((kept == 0).all(1, keepdim=True), drawn, kept)


def gather(s: Stack) -> None:
    """Q = M^T P of a stack, by tensor operations."""
    # Transposing the thin factors instead of the matrices is three times as fast on a CPU.
    s.right.copy_(torch.bmm(s.left.transpose(1, 2), s.total).transpose(1, 2))
