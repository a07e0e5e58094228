"""Matrices of PowerSGD in memory: stacks of equal lengths, their residuals and factors, and operations on them.

What is made of averaged factors is equal bit for bit on every device, by elementwise operations in a fixed order. Products
with a rank's own gradient, which no other rank repeats, may be summed in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch

from bagua_kernels.compression.powersgd.orthonormal import finite, orthonormalize
from bagua_kernels.launchers.low_rank import compiled_for, suits
from bagua_kernels.launchers.low_rank.passes import Passes


class Matrix(NamedTuple):
    """A compressed tensor, viewed as dimension 0 x all others: its place in the list, its name and lengths."""

    place: int
    name: str
    shape: torch.Size
    rows: int
    columns: int
    rank: int


class Stack(NamedTuple):
    """Matrices of equal lengths, and views of their share of the buffers, of shapes (matrices, length, length).

    The residual is `before` minus the product of the last factors. No pass over the matrix is therefore needed to subtract
    it.
    """

    matrices: list[Matrix]
    total: torch.Tensor  # rows x columns: M, the tensor with the residual
    before: torch.Tensor  # rows x columns: M of the last step, or the residual where the factors beside it are zero
    before_left: torch.Tensor  # rows x rank
    before_right: torch.Tensor  # rank x columns
    left: torch.Tensor  # rows x rank: P
    right: torch.Tensor  # columns x rank: Q
    kept: torch.Tensor  # columns x rank: Q of the last step that made it
    drawn: torch.Tensor  # columns x rank: random numbers, in place of columns of zeros in Q
    turned: torch.Tensor  # rank x columns: room for Q by columns
    kept_left: torch.Tensor  # rows x rank: P of the last step that made it, if steps take turns


class Stacks:
    """All compressed matrices of one rank: their residuals and factors, in flat buffers, and how a step changes them.

    Attributes:
        each: matrices of equal lengths together, in the order of the buffers.
        left: shape (sum of rows x rank,): all left factors.
        right: shape (sum of columns x rank,): all right factors.
        passes: compiled passes over all stacks; None where tensor operations take their place.
    """

    def __init__(
        self, matrices: list[Matrix], dtype: torch.dtype, device: torch.device, before: Stacks | None = None
    ) -> None:
        """Begins with residuals and factors of zero.

        Args:
            matrices: in any order.
            dtype: of everything.
            device: of everything.
            before: stacks of the same matrices, whatever their ranks, whose residuals and memory are taken over.
        """
        # What is alike lies side by side in the flat buffers, so that it is computed in one call.
        matrices = sorted(matrices, key=lambda m: (m.rows, m.rank, m.columns))
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        left_size, right_size = sum(m.rows * m.rank for m in matrices), sum(m.columns * m.rank for m in matrices)
        areas = [m.rows * m.columns for m in matrices]
        self._room: torch.Tensor | None = None
        self.left, self.right = zeros(left_size), zeros(right_size)
        groups = [list(g) for _, g in groupby(matrices, lambda m: (m.rows, m.rank, m.columns))]
        if before is None:
            # A step writes `total` before it reads it.
            flats = [torch.empty(sum(areas), dtype=dtype, device=device), zeros(sum(areas))]
            wholes = [views(flat, groups, "rows", "columns") for flat in flats]
        else:
            before.settle()
            wholes = [[s.total for s in before.each], [s.before for s in before.each]]
        lefts = [views(flat, groups, "rows", "rank") for flat in (zeros(left_size), self.left, zeros(left_size))]
        rights = [views(flat, groups, "columns", "rank") for flat in (self.right, zeros(right_size), zeros(right_size))]
        turned = [views(zeros(right_size), groups, "rank", "columns") for _ in range(2)]
        parts = zip(groups, *wholes, lefts[0], turned[0], lefts[1], *rights, turned[1], lefts[2], strict=True)
        self.each: list[Stack] = [Stack(*part) for part in parts]
        self.passes = Passes(self.memory()) if matrices and compiled_for(self.left) else None
        self._due = [False] * len(self.each)  # True if the last output is still to be taken off
        # Matrices of as many rows are orthonormalised together, whatever their columns.
        groups = [list(g) for _, g in groupby(matrices, lambda m: (m.rows, m.rank))]
        self._factors = views(self.left, groups, "rows", "rank")

    @property
    def _scratch(self) -> torch.Tensor:
        """Room for a product and a term of it, made when tensor operations need it first."""
        if self._room is None:
            areas = (m.rows * m.columns for s in self.each for m in s.matrices)
            with torch.inference_mode(False):  # later steps may be for training
                self._room = self.left.new_empty(2, max(areas, default=0))
        return self._room

    def orthonormalize_left(self) -> None:
        """Makes the columns of all left factors orthonormal."""
        for factors in self._factors:
            orthonormalize(factors)

    def forget_factors(self) -> None:
        """Makes `before` the residual itself, without taking anything off: a saved residual is loaded next."""
        for s in self.each:
            s.before_left.zero_()
        self._due = [False] * len(self.each)

    def compiled(self, tensors: list[list[torch.Tensor]]) -> list[int]:
        """The numbers of the stacks whose tensors compiled passes can take."""
        if self.passes is None:
            return []
        return [place for place, given in enumerate(tensors) if all(map(suits, given))]

    def memory(self) -> list[Sequence[torch.Tensor]]:
        """The tensors of each stack, in the order of the passes' table."""
        return [s[1:] for s in self.each]

    def add(self, place: int, gradients: Sequence[torch.Tensor]) -> None:
        """M of a stack, by tensor operations."""
        self.take_off(place)
        s = self.each[place]
        for m, total, residual, gradient in zip(s.matrices, s.total, s.before, gradients, strict=True):
            torch.add(residual.view(m.shape), gradient, out=total.view(m.shape))

    def spoil(self, place: int, factor: torch.Tensor) -> None:
        """Makes a factor of a stack NaN where M is not finite."""
        # The product alone would not do: a library may skip what it would multiply by zero.
        factor.masked_fill_(~finite(self.each[place].total), math.nan)

    def leave(self, place: int, kept: Sequence[bool]) -> None:
        """Leaves it to the next step to take the output of a stack off, of those matrices whose factors have been kept."""
        s = self.each[place]
        self._due[place] = True
        if all(kept):
            self.each[place] = s._replace(total=s.before, before=s.total)
        else:
            for i in (i for i, good in enumerate(kept) if good):
                s.before[i] = s.total[i]

    def write_and_take_off(self, place: int, out: Sequence[torch.Tensor] | None) -> None:
        """Writes the output of a stack, if it is asked for, and keeps what it misses in the dtype of `out`, wherever finite."""
        self.take_off(place)
        s = self.each[place]
        for i, (total, left, right) in enumerate(zip(s.total, s.left, s.right, strict=True)):
            output = product(left, right, self._scratch)
            if out is not None:
                output = out[i].copy_(output.view(out[i].shape))
            total.view(output.shape).sub_(output)
        torch.where(finite(s.total), s.total, s.before, out=s.before)

    def take_off(self, place: int) -> None:
        """Makes `before` the residual itself."""
        s = self.each[place]
        if self._due[place]:
            for before, left, right in zip(s.before, s.before_left, s.before_right, strict=True):
                before.sub_(product(left, right.t(), self._scratch))
            s.before_left.zero_()
            self._due[place] = False

    def settle(self) -> None:
        """Makes `before` of all stacks the residual itself, without more memory; its last bit is not that of `take_off`."""
        for s in (s for s, due in zip(self.each, self._due, strict=True) if due):
            for before, left, right in zip(s.before, s.before_left, s.before_right, strict=True):
                for k in range(len(right)):
                    before.addr_(left[:, k], right[k], alpha=-1.0)
        self.forget_factors()

    def scale(self, factor: float) -> None:
        """Multiplies the residuals."""
        for place, s in enumerate(self.each):
            self.take_off(place)
            s.before.mul_(factor)

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Adds the residuals to tensors, and sets them to zero."""
        for place, s in enumerate(self.each):
            self.take_off(place)
            for m, residual in zip(s.matrices, s.before, strict=True):
                tensors[m.place].add_(residual.view(m.shape))
            s.before.zero_()

    @contextmanager
    def withheld(self, places: Sequence[int]) -> Iterator[None]:
        """Within this block the residuals of the tensors with these indices are zero; then they and the factors are as before."""
        chosen = set(places)
        found = [(n, i) for n, s in enumerate(self.each) for i, m in enumerate(s.matrices) if m.place in chosen]
        with torch.no_grad():
            kept = [[t.clone() for t in self._lasting(n, i)] for n, i in found]
            for n, i in found:
                self.each[n].before[i].zero_()
        try:
            yield
        finally:
            with torch.no_grad():
                for (n, i), before in zip(found, kept, strict=True):
                    for t, value in zip(self._lasting(n, i), before, strict=True):
                        t.copy_(value)

    def _lasting(self, place: int, i: int) -> list[torch.Tensor]:
        """What a matrix of a stack has from step to step: its residual, and its factors."""
        self.take_off(place)
        return [self.each[place].before[i], self.each[place].kept[i], self.each[place].kept_left[i]]

    def residuals(self) -> dict[str, torch.Tensor]:
        """A copy of each matrix's residual, by name; nothing is changed, since another thread may take a step meanwhile."""
        found = {}
        for s, due in zip(self.each, self._due, strict=True):
            for i, m in enumerate(s.matrices):
                scratch = s.before.new_empty(2, m.rows * m.columns if due else 0)
                output = product(s.before_left[i], s.before_right[i].t(), scratch) if due else 0.0
                found[m.name] = s.before[i] - output
        return found

    def by_name(self, stacks: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of all stacks, one for each matrix, by the name of the matrix."""
        names = [m.name for s in self.each for m in s.matrices]
        return dict(zip(names, (t for stack in stacks for t in stack), strict=True))


def nonzero(kept: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Factors of a stack, with columns of random numbers in place of those of zeros."""
    # A column that became zero would stay zero whatever gradients come.
    return torch.where((kept == 0).all(1, keepdim=True), drawn, kept)


def gather(s: Stack) -> None:
    """Q = M^T P of a stack, by tensor operations."""
    # Transposing the thin factors instead of the matrices is three times as fast on a CPU.
    s.right.copy_(torch.bmm(s.left.transpose(1, 2), s.total).transpose(1, 2))


def product(left: torch.Tensor, right: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """P Q^T, in memory of shape (2, n m or more)."""
    # Column by column instead of a matrix product, whose rounding differs between libraries and devices.
    p, q = left.unsqueeze(2), right
    whole: torch.Tensor
    whole, term = scratch[:, : len(left) * len(right)].view(2, len(left), len(right))
    torch.mul(p[:, 0], q[:, 0], out=whole)
    for k in range(1, left.shape[1]):
        whole += torch.mul(p[:, k], q[:, k], out=term)
    return whole


def views(flat: torch.Tensor, groups: list[list[Matrix]], rows: str, columns: str) -> list[torch.Tensor]:
    """Cuts a buffer into one tensor for each group of alike matrices; `rows` and `columns` name the sides of its matrices."""
    shapes = [(len(group), getattr(group[0], rows), getattr(group[0], columns)) for group in groups]
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
