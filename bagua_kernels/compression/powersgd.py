"""PowerSGD: a matrix is sent as two thin factors, made by one step of subspace iteration; linear, with error feedback.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019, algorithms 1 and 2; `docs/powersgd.md` has the formulas. Nothing here communicates: the caller averages the factors over
the ranks. What is made of averaged factors is equal bit for bit on every device, by elementwise operations in a fixed order.
Products with a rank's own gradient, which no other rank repeats, may be summed in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch

from bagua_kernels.compression import _numba_cpu_low_rank
from bagua_kernels.compression._numba_cpu_low_rank_update import update_tensors
from bagua_kernels.compression.codec import MASK, fold_seed
from bagua_kernels.compression.orthonormal import finite, gaussian, name_number, orthonormalize, power_of_two
from bagua_kernels.launchers.multitensor import TensorUpdate


@dataclass(frozen=True)
class PowerSGD:
    """The configuration of PowerSGD; equal on all ranks.

    Attributes:
        rank: columns of a factor, 1 or more; at most the lesser side of a matrix is used. The paper uses 1 to 4.
        seed: of the first right factors, 0 to 2**64 - 1.
        min_compression: a matrix is compressed if its factors are at least this many times smaller than itself. 0
            compresses every matrix.
        warm_start: begin each step with the right factors of the last (paper, section 3), instead of with new random ones.

    Raises:
        ValueError: an attribute is out of its range.
    """

    rank: int = 1
    seed: int = 0
    min_compression: float = 2.0
    warm_start: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}; 1 compresses most")
        if not 0 <= self.seed <= MASK:
            raise ValueError(f"seed must be from 0 to 2**64 - 1, got {self.seed}")
        if not 0 <= self.min_compression < math.inf:
            raise ValueError(
                f"min_compression must be finite and 0 (compresses all) or more, got {self.min_compression}"
            )

    def start(
        self,
        shapes: Iterable[Sequence[int]],
        names: Iterable[str] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> LowRank:
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
        return LowRank(self, sizes, labels, dtype, torch.device(device))


class _Matrix(NamedTuple):
    """A compressed tensor, viewed as dimension 0 x all others: its place in the list, its name and lengths."""

    place: int
    name: str
    shape: torch.Size
    rows: int
    columns: int
    rank: int


class _Stack(NamedTuple):
    """Matrices of equal lengths, and views of their share of the buffers, of shapes (matrices, length, length).

    The residual is `before` less the product of the factors that were the last to be given out, so that no pass over the matrix
    is needed to take that off.
    """

    matrices: list[_Matrix]
    total: torch.Tensor  # rows x columns: M, the tensor with the residual
    before: torch.Tensor  # rows x columns: M of the last step, or the residual where the factors beside it are zero
    before_left: torch.Tensor  # rows x rank
    before_right: torch.Tensor  # rank x columns
    left: torch.Tensor  # rows x rank: P
    right: torch.Tensor  # columns x rank: Q
    kept: torch.Tensor  # columns x rank: Q of the last step
    drawn: torch.Tensor  # columns x rank: random numbers, in place of columns of zeros in Q
    turned: torch.Tensor  # rank x columns: room for Q by columns


class LowRank:
    """Residuals and right factors of one rank; made by `PowerSGD.start`.

    A step is `left`, `right` and `finish`, with an average over all ranks after each of the first two; another order is a
    `RuntimeError`. Nothing is kept before `finish`, so a step that broke off is repeated from `left`.

    Attributes:
        dense: indices of the tensors that are not compressed, because they are empty, have fewer than two dimensions or
            would save too little; the caller sends them as they are.
        step: number of finished steps.
        left_size, right_size: elements of the factors.
    """

    def __init__(
        self, config: PowerSGD, shapes: list[torch.Size], names: list[str], dtype: torch.dtype, device: torch.device
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"the state's dtype must be torch.float32 or torch.float64, got {dtype}")
        if len(names) != len(shapes) or len(set(names)) != len(names):
            raise ValueError(f"expected a different name for each of {len(shapes)} shapes, got {names}")
        self.config = config
        self.step = 0
        found = [_compressed(config, i, name, shape) for i, (name, shape) in enumerate(zip(names, shapes, strict=True))]
        # What is alike lies side by side in the flat buffers, so that it is computed in one call.
        matrices = sorted((m for m in found if m is not None), key=lambda m: (m.rows, m.rank, m.columns))
        self.dense = tuple(i for i, m in enumerate(found) if m is None)
        self.left_size = sum(m.rows * m.rank for m in matrices)
        self.right_size = sum(m.columns * m.rank for m in matrices)
        self._count = len(shapes)
        self._next = "left"
        self._owes = False  # whether a residual may be other than zero
        self._small: list[bool] = []  # of the stacks of the step under way: whether no difference can overflow
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        areas = [m.rows * m.columns for m in matrices]
        self._scratch = zeros(2, max(areas, default=0))
        self._left, self._right = zeros(self.left_size), zeros(self.right_size)
        groups = [list(g) for _, g in groupby(matrices, lambda m: (m.rows, m.rank, m.columns))]
        wholes = [_views(zeros(sum(areas)), groups, "rows", "columns") for _ in range(2)]
        lefts = [_views(flat, groups, "rows", "rank") for flat in (zeros(self.left_size), self._left)]
        flats = (self._right, zeros(self.right_size), zeros(self.right_size))
        rights = [_views(flat, groups, "columns", "rank") for flat in flats]
        turned = [_views(zeros(self.right_size), groups, "rank", "columns") for _ in range(2)]
        parts = zip(groups, *wholes, lefts[0], turned[0], lefts[1], *rights, turned[1], strict=True)
        self._stacks = [_Stack(*part) for part in parts]
        # Passes over all stacks at once, where there are such.
        suited = matrices and _numba_cpu_low_rank.suits(self._left)
        self._passes = _numba_cpu_low_rank.Passes(self._memory()) if suited else None
        self._due = [False] * len(self._stacks)  # whether the last output is still to be taken off
        # Matrices of as many rows are orthonormalised together, whatever their columns.
        groups = [list(g) for _, g in groupby(matrices, lambda m: (m.rows, m.rank))]
        self._factors = _views(self._left, groups, "rows", "rank")
        self._draw()

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
                self._take_off(place)
                for m, total, residual, gradient in zip(s.matrices, s.total, s.before, gradients, strict=True):
                    torch.add(residual.view(m.shape), gradient, out=total.view(m.shape))
                # A column that became zero would stay zero whatever gradients come.
                right = torch.where((s.kept == 0).all(1, keepdim=True), s.drawn, s.kept)
                torch.bmm(s.total, right, out=s.left)
            if not self._small[place]:
                # The product alone would not do: a library may skip what it would multiply by zero.
                s.left.masked_fill_(~finite(s.total), math.nan)
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
        for factors in self._factors:
            orthonormalize(factors)
        if self._passes is not None:
            self._passes.gather(self._memory())
        else:
            for s in self._stacks:
                # Transposing the thin factors instead of the matrices is three times as fast on a CPU.
                s.right.copy_(torch.bmm(s.left.transpose(1, 2), s.total).transpose(1, 2))
        self._next = "finish"
        return self._right

    @torch.no_grad()
    def finish(self, right: torch.Tensor, out: Sequence[torch.Tensor]) -> None:
        """Writes P Q^T to `out` and keeps what it misses of this rank's M, rounding to the dtype of `out` included.

        A matrix that held inf or NaN on any rank becomes NaN on all; its residual and right factor stay as they were.

        Args:
            right: shape (right_size,), the average over all ranks of what `right` returned, equal on all of them.
            out: all tensors; those in `dense` are not touched. Dtypes as in `left`; may be the tensors given to it.
                Errors as in `left`.
        """
        self._check_tensors("out", out)
        self._take("finish", right, self._right)
        into = [[out[m.place] for m in s.matrices] for s in self._stacks]
        compiled = [place for place in self._compiled(into) if self._small[place]]
        found: list[list[bool]] = []
        if self._passes is not None and compiled:
            found = self._passes.approximate(self._memory(), compiled, into, self.config.warm_start)
        self._end_step(dict(zip(compiled, found, strict=True)), into)

    @property
    def updates(self) -> bool:
        """Whether there is `finish_with_updates`: for float32 on the CPU."""
        return self._passes is not None

    @torch.no_grad()
    def finish_with_updates(self, right: torch.Tensor, updates: Mapping[int, TensorUpdate]) -> None:
        """As `finish`, but P Q^T updates parameters as their gradient, and is not written to memory.

        What breaks off here is not to be repeated: some of the parameters may have been updated.

        Args:
            right: as for `finish`.
            updates: for each tensor's index that is not in `dense`.

        Raises:
            ValueError: `right` as for `finish`, or an update is lacking, or does not fit its tensor.
            RuntimeError: see `updates`.
        """
        if self._passes is None:
            raise RuntimeError("steps with updates are for float32 on the CPU; call `finish` and then the optimizer")
        for m in (m for s in self._stacks for m in s.matrices):
            update = updates.get(m.place)
            if update is None or not update.fits(m.rows * m.columns):
                raise ValueError(
                    f"expected an update of {m.rows * m.columns} float32 elements by an elementwise rule for tensor {m.place} "
                    f"({m.name!r}), got {update}; `Part.from_factors` gives them in the order of its parameters"
                )
        self._take("finish", right, self._right)
        chosen = [place for place, small in enumerate(self._small) if small]
        by_stack = [[updates[m.place] for m in s.matrices] for s in self._stacks]
        found = update_tensors(self._passes, self._memory(), chosen, by_stack, self.config.warm_start)
        self._end_step(dict(zip(chosen, found, strict=True)), None)

    def _end_step(self, kept: Mapping[int, Sequence[bool]], out: list[list[torch.Tensor]] | None) -> None:
        """Keeps what passes have not, which tell of which matrices of a stack they have, and writes the output of that."""
        for place, s in enumerate(self._stacks):
            if place in kept:
                self._leave(place, kept[place])
            else:
                self._write_and_take_off(place, None if out is None else out[place])
                self._keep(s)
        self.step += 1
        self._owes = True
        self._next = "left"
        if not self.config.warm_start:
            self._draw()

    def _compiled(self, tensors: list[list[torch.Tensor]]) -> list[int]:
        """The stacks whose tensors compiled passes can take."""
        if self._passes is None:
            return []
        return [place for place, given in enumerate(tensors) if all(map(_numba_cpu_low_rank.suits, given))]

    def _memory(self) -> list[Sequence[torch.Tensor]]:
        """The tensors of each stack, which have the order of the passes' table."""
        return [s[1:] for s in self._stacks]

    def _leave(self, place: int, kept: Sequence[bool]) -> None:
        """Leaves it to the next step to take the output of a stack off, of those matrices whose factors have been kept."""
        s = self._stacks[place]
        self._due[place] = True
        if all(kept):
            self._stacks[place] = s._replace(total=s.before, before=s.total)
        else:
            for i in (i for i, good in enumerate(kept) if good):
                s.before[i] = s.total[i]

    def _write_and_take_off(self, place: int, out: Sequence[torch.Tensor] | None) -> None:
        """Writes the output of a stack, if it is asked for, and keeps what it misses in the dtype of `out`, wherever finite."""
        self._take_off(place)
        s = self._stacks[place]
        for i, (total, left, right) in enumerate(zip(s.total, s.left, s.right, strict=True)):
            product = _product(left, right, self._scratch)
            if out is not None:
                product = out[i].copy_(product.view(out[i].shape))
            total.view(product.shape).sub_(product)
        torch.where(finite(s.total), s.total, s.before, out=s.before)

    def _take_off(self, place: int) -> None:
        """Makes `before` the residual itself."""
        s = self._stacks[place]
        if self._due[place]:
            for before, left, right in zip(s.before, s.before_left, s.before_right, strict=True):
                before.sub_(_product(left, right.t(), self._scratch))
            s.before_left.zero_()
            self._due[place] = False

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiplies the residuals, for gradients that are in another unit from now on."""
        for place, s in enumerate(self._stacks):
            self._take_off(place)
            s.before.mul_(factor)

    @torch.no_grad()
    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Adds the residuals to tensors that are sent without compression, and sets them to zero.

        Args:
            tensors: as for `left`, which is next; those in `dense` are not touched. Errors as there.
        """
        self._check_tensors("tensors", tensors)
        self._next = "left"
        if not self._owes:
            return
        for place, s in enumerate(self._stacks):
            self._take_off(place)
            for m, residual in zip(s.matrices, s.before, strict=True):
                tensors[m.place].add_(residual.view(m.shape))
            s.before.zero_()
        self._owes = False

    def _keep(self, s: _Stack) -> None:
        if self.config.warm_start:
            # Only the direction of a column counts; its length, that of a gradient, could overflow the next product.
            good = finite(s.left) & finite(s.right)
            torch.where(good, s.right / power_of_two(s.right), s.kept, out=s.kept)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """A copy of the step, and by name of the residuals, which differ from rank to rank, and of the right factors."""
        residuals, rights = {}, {}
        for s, due in zip(self._stacks, self._due, strict=True):
            for i, m in enumerate(s.matrices):
                # Nothing is changed, in case that another thread takes a step meanwhile.
                scratch = s.before.new_empty(2, m.rows * m.columns if due else 0)
                product = _product(s.before_left[i], s.before_right[i].t(), scratch) if due else 0.0
                residuals[m.name] = s.before[i] - product
                rights[m.name] = s.kept[i].clone()
        return {"step": self.step, "residuals": residuals, "rights": rights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, whatever the order of the tensors; a step under way is forgotten.

        Raises:
            ValueError: the matrices differ in their names or shapes, or the rank differs; nothing is changed then.
        """
        places = {m.name: (s, i) for s in self._stacks for i, m in enumerate(s.matrices)}
        targets = {
            "residuals": {name: s.before[i] for name, (s, i) in places.items()},
            "rights": {name: s.kept[i] for name, (s, i) in places.items()},
        }
        for key, own in targets.items():
            wanted, found = ({name: tuple(t.shape) for name, t in part.items()} for part in (own, state[key]))
            differ = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
            if differ:
                raise ValueError(
                    f"{key} of {differ}: expected shapes {[wanted.get(n) for n in differ]}, got "
                    f"{[found.get(n) for n in differ]}; start with the names, shapes and rank that were saved"
                )
        for s in self._stacks:
            s.before_left.zero_()
        self._due = [False] * len(self._stacks)
        for key, own in targets.items():
            for name, target in own.items():
                target.copy_(state[key][name])
        self.step = int(state["step"])
        self._owes = True
        self._next = "left"
        self._draw()

    def _draw(self) -> None:
        step = 0 if self.config.warm_start else self.step
        for s in self._stacks:
            for m, drawn in zip(s.matrices, s.drawn, strict=True):
                seed = fold_seed(self.config.seed, step, name_number(m.name))
                drawn.copy_(torch.from_numpy(gaussian(seed, drawn.shape)))

    def _take(self, call: str, given: torch.Tensor, own: torch.Tensor) -> None:
        if self._next != call:
            raise RuntimeError(f"call `{self._next}` next, not `{call}`; a step is `left`, `right`, `finish`")
        if (given.shape, given.dtype, given.device) != (own.shape, own.dtype, own.device):
            raise ValueError(
                f"`{call}` expected factors of shape {tuple(own.shape)}, {own.dtype}, {own.device}, got {tuple(given.shape)}, "
                f"{given.dtype}, {given.device}; average what the last call returned in place"
            )
        if given is not own:
            own.copy_(given)

    def _check_tensors(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self._count:
            raise ValueError(f"expected {self._count} {what}, as many as `start` was given shapes, got {len(tensors)}")
        own = self._left
        for m in (m for s in self._stacks for m in s.matrices):
            t = tensors[m.place]
            dtypes = {torch.float32, torch.float16, torch.bfloat16, own.dtype}
            if t.shape != m.shape or t.dtype not in dtypes or t.device != own.device:
                raise ValueError(
                    f"{what}[{m.place}] ({m.name!r}): expected shape {tuple(m.shape)}, {own.device}, and one of "
                    f"{sorted(map(str, dtypes))}, got {tuple(t.shape)}, {t.device}, {t.dtype}; convert it or start anew"
                )


def _compressed(config: PowerSGD, place: int, name: str, shape: torch.Size) -> _Matrix | None:
    rows, columns = shape[:1].numel(), shape[1:].numel()
    rank = min(config.rank, rows, columns)
    too_large = (rows + columns) * rank * config.min_compression > rows * columns
    return None if len(shape) < 2 or rank == 0 or too_large else _Matrix(place, name, shape, rows, columns, rank)


def _product(left: torch.Tensor, right: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """P Q^T, in memory of shape (2, n m or more)."""
    # Column by column instead of a matrix product, whose rounding differs between libraries and devices.
    p, q = left.unsqueeze(2), right
    whole: torch.Tensor
    whole, product = scratch[:, : len(left) * len(right)].view(2, len(left), len(right))
    torch.mul(p[:, 0], q[:, 0], out=whole)
    for k in range(1, left.shape[1]):
        whole += torch.mul(p[:, k], q[:, k], out=product)
    return whole


def _views(flat: torch.Tensor, groups: list[list[_Matrix]], rows: str, columns: str) -> list[torch.Tensor]:
    """Cuts a buffer into one tensor for each group of alike matrices; `rows` and `columns` name the sides of its matrices."""
    shapes = [(len(group), getattr(group[0], rows), getattr(group[0], columns)) for group in groups]
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
