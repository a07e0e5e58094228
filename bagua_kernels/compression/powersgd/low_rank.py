"""What PowerSGD's states have in common, however many messages a step has: residuals, factors, and what is made of them.

What is made of averaged factors is equal bit for bit on every device, by elementwise operations in a fixed order. Products
with a rank's own gradient, which no other rank repeats, may be summed in any order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bagua_kernels.compression.codec import fold_seed
from bagua_kernels.compression.powersgd.orthonormal import finite, gaussian, name_number, orthonormalize, power_of_two
from bagua_kernels.launchers.low_rank import KEEP_LEFT, KEEP_NOTHING, KEEP_RIGHT, suits
from bagua_kernels.launchers.low_rank.passes import Passes
from bagua_kernels.launchers.multitensor import TensorUpdate

if TYPE_CHECKING:
    from bagua_kernels.compression.powersgd.config import PowerSGD


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

    The residual is `before` less the product of the factors that were the last to be given out, so that no pass over the matrix
    is needed to take that off.
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


class LowRankState:
    """Residuals and factors of one rank.

    Nothing is kept before `finish`, so a step that broke off is repeated from its first call.

    Attributes:
        dense: indices of the tensors that are not compressed, because they are empty, have fewer than two dimensions or
            would save too little; the caller sends them as they are.
        step: number of finished steps.
        left_size, right_size: elements of the factors.
    """

    _first = "left"  # the call that a step begins with
    _calls = "`left`, `right`, `finish`"

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
        self._next = self._first
        self._owes = False  # whether a residual may be other than zero
        self._small: list[bool] = []  # of the stacks of the step under way: whether no difference can overflow
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        areas = [m.rows * m.columns for m in matrices]
        self._scratch = zeros(2, max(areas, default=0))
        self._left, self._right = zeros(self.left_size), zeros(self.right_size)
        groups = [list(g) for _, g in groupby(matrices, lambda m: (m.rows, m.rank, m.columns))]
        wholes = [views(zeros(sum(areas)), groups, "rows", "columns") for _ in range(2)]
        flats = (zeros(self.left_size), self._left, zeros(self.left_size))
        lefts = [views(flat, groups, "rows", "rank") for flat in flats]
        flats = (self._right, zeros(self.right_size), zeros(self.right_size))
        rights = [views(flat, groups, "columns", "rank") for flat in flats]
        turned = [views(zeros(self.right_size), groups, "rank", "columns") for _ in range(2)]
        parts = zip(groups, *wholes, lefts[0], turned[0], lefts[1], *rights, turned[1], lefts[2], strict=True)
        self._stacks = [Stack(*part) for part in parts]
        # Passes over all stacks at once, where there are such.
        suited = matrices and suits(self._left)
        self._passes = Passes(self._memory()) if suited else None
        self._due = [False] * len(self._stacks)  # whether the last output is still to be taken off
        # Matrices of as many rows are orthonormalised together, whatever their columns.
        groups = [list(g) for _, g in groupby(matrices, lambda m: (m.rows, m.rank))]
        self._factors = views(self._left, groups, "rows", "rank")
        self._draw()

    def _orthonormalize_left(self) -> None:
        for factors in self._factors:
            orthonormalize(factors)

    @torch.no_grad()
    def finish(self, factor: torch.Tensor, out: Sequence[torch.Tensor]) -> None:
        """Writes P Q^T to `out` and keeps what it misses of this rank's M, rounding to the dtype of `out` included.

        A matrix that held inf or NaN on any rank becomes NaN on all; its residual and factors stay as they were.

        Args:
            factor: the average over all ranks of what the step's last call returned, equal on all of them.
            out: all tensors; those in `dense` are not touched. Dtypes as in the step's first call; may be the tensors given
                to it. Errors as there.
        """
        self._check_tensors("out", out)
        self._take("finish", factor, self._last)
        into = [[out[m.place] for m in s.matrices] for s in self._stacks]
        compiled = [place for place in self._compiled(into) if self._small[place]]
        found: list[list[bool]] = []
        if self._passes is not None and compiled:
            found = self._passes.approximate(self._memory(), compiled, into, self._keeps)
        self._end_step(dict(zip(compiled, found, strict=True)), into)

    @property
    def updates(self) -> bool:
        """Whether there is `finish_with_updates`: for float32 on the CPU."""
        return self._passes is not None

    @torch.no_grad()
    def finish_with_updates(self, factor: torch.Tensor, updates: Mapping[int, TensorUpdate]) -> None:
        """As `finish`, but P Q^T updates parameters as their gradient, and is not written to memory.

        What breaks off here is not to be repeated: some of the parameters may have been updated.

        Args:
            factor: as for `finish`.
            updates: for each tensor's index that is not in `dense`.

        Raises:
            ValueError: `factor` as for `finish`, or an update is lacking, or does not fit its tensor.
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
        self._take("finish", factor, self._last)
        chosen = [place for place, small in enumerate(self._small) if small]
        by_stack = [[updates[m.place] for m in s.matrices] for s in self._stacks]
        found = self._passes.update(self._memory(), chosen, by_stack, self._keeps)
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
        self._next = self._first
        if not self.config.warm_start:
            self._draw()

    @property
    def _last(self) -> torch.Tensor:
        """The factor that a step makes last."""
        return self._right

    @property
    def _keeps(self) -> int:
        """Which factors the step under way leaves to later ones."""
        return KEEP_RIGHT if self.config.warm_start else KEEP_NOTHING

    def _compiled(self, tensors: list[list[torch.Tensor]]) -> list[int]:
        """The stacks whose tensors compiled passes can take."""
        if self._passes is None:
            return []
        return [place for place, given in enumerate(tensors) if all(map(suits, given))]

    def _memory(self) -> list[Sequence[torch.Tensor]]:
        """The tensors of each stack, which have the order of the passes' table."""
        return [s[1:] for s in self._stacks]

    def _add(self, place: int, gradients: Sequence[torch.Tensor]) -> None:
        """M of a stack, by tensor operations."""
        self._take_off(place)
        s = self._stacks[place]
        for m, total, residual, gradient in zip(s.matrices, s.total, s.before, gradients, strict=True):
            torch.add(residual.view(m.shape), gradient, out=total.view(m.shape))

    def _spoil(self, place: int, factor: torch.Tensor) -> None:
        """Makes a factor of a stack NaN where M is not finite."""
        if not self._small[place]:
            # The product alone would not do: a library may skip what it would multiply by zero.
            factor.masked_fill_(~finite(self._stacks[place].total), math.nan)

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

    @contextlib.contextmanager
    def withheld(self, places: Sequence[int]) -> Iterator[None]:
        """For a step within this block the residuals of some tensors are zero; then they and the factors are as before.

        Args:
            places: indices of the tensors; those in `dense` have nothing that could be withheld.
        """
        chosen = set(places)
        found = [(n, i) for n, s in enumerate(self._stacks) for i, m in enumerate(s.matrices) if m.place in chosen]
        with torch.no_grad():
            kept = [[t.clone() for t in self._lasting(n, i)] for n, i in found]
            for n, i in found:
                self._stacks[n].before[i].zero_()
        try:
            yield
        finally:
            with torch.no_grad():
                for (n, i), before in zip(found, kept, strict=True):
                    for t, value in zip(self._lasting(n, i), before, strict=True):
                        t.copy_(value)

    def _lasting(self, place: int, i: int) -> list[torch.Tensor]:
        """What a matrix of a stack has from step to step: its residual, and its factors."""
        self._take_off(place)
        return [self._stacks[place].before[i], self._stacks[place].kept[i], self._stacks[place].kept_left[i]]

    @torch.no_grad()
    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Adds the residuals to tensors that are sent without compression, and sets them to zero.

        Args:
            tensors: as for a step's first call, which is next; those in `dense` are not touched. Errors as there.
        """
        self._check_tensors("tensors", tensors)
        self._next = self._first
        if not self._owes:
            return
        for place, s in enumerate(self._stacks):
            self._take_off(place)
            for m, residual in zip(s.matrices, s.before, strict=True):
                tensors[m.place].add_(residual.view(m.shape))
            s.before.zero_()
        self._owes = False

    def _keep(self, s: Stack) -> None:
        good = finite(s.left) & finite(s.right)
        if self._keeps == KEEP_RIGHT:
            # Only the direction of a column counts; its length, that of a gradient, could overflow the next product.
            torch.where(good, s.right / power_of_two(s.right), s.kept, out=s.kept)
        elif self._keeps == KEEP_LEFT:
            torch.where(good, s.left, s.kept_left, out=s.kept_left)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """A copy of the step, and by name of the residuals, which differ from rank to rank, and of the factors."""
        residuals = {}
        for s, due in zip(self._stacks, self._due, strict=True):
            for i, m in enumerate(s.matrices):
                # Nothing is changed, in case that another thread takes a step meanwhile.
                scratch = s.before.new_empty(2, m.rows * m.columns if due else 0)
                product = _product(s.before_left[i], s.before_right[i].t(), scratch) if due else 0.0
                residuals[m.name] = s.before[i] - product
        factors = {
            key: {name: t.clone() for name, t in self._by_name(kept).items()}
            for key, kept in self._factors_to_save().items()
        }
        return {"step": self.step, "residuals": residuals, **factors}

    def _by_name(self, stacks: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        names = [m.name for s in self._stacks for m in s.matrices]
        return dict(zip(names, (t for stack in stacks for t in stack), strict=True))

    def _factors_to_save(self) -> dict[str, list[torch.Tensor]]:
        """The factors that are kept, by what they are called in `state_dict` and by stack."""
        return {"rights": [s.kept for s in self._stacks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, whatever the order of the tensors; a step under way is forgotten.

        Raises:
            ValueError: the matrices differ in their names or shapes, or the rank differs; nothing is changed then.
        """
        stacks = {"residuals": [s.before for s in self._stacks], **self._factors_to_save()}
        targets = {key: self._by_name(of) for key, of in stacks.items()}
        for key, own in targets.items():
            wanted, found = ({name: tuple(t.shape) for name, t in part.items()} for part in (own, state.get(key, {})))
            differ = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
            if differ:
                raise ValueError(
                    f"{key} of {differ}: expected shapes {[wanted.get(n) for n in differ]}, got "
                    f"{[found.get(n) for n in differ]}; start with the names, shapes, rank and `alternate` that were saved"
                )
        for s in self._stacks:
            s.before_left.zero_()
        self._due = [False] * len(self._stacks)
        for key, own in targets.items():
            for name, target in own.items():
                target.copy_(state[key][name])
        self.step = int(state["step"])
        self._owes = True
        self._next = self._first
        self._draw()

    def _draw(self) -> None:
        self._fill(0 if self.config.warm_start else self.step, [s.drawn for s in self._stacks])

    def _fill(self, number: int, stacks: Sequence[torch.Tensor]) -> None:
        """Writes the random numbers of a step to factors, by stack."""
        for s, drawn in zip(self._stacks, stacks, strict=True):
            for m, factor in zip(s.matrices, drawn, strict=True):
                seed = fold_seed(self.config.seed, number, name_number(m.name))
                factor.copy_(torch.from_numpy(gaussian(seed, factor.shape)))

    def _take(self, call: str, given: torch.Tensor, own: torch.Tensor) -> None:
        if self._next != call:
            raise RuntimeError(f"call `{self._next}` next, not `{call}`; a step is {self._calls}")
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


def _compressed(config: PowerSGD, place: int, name: str, shape: torch.Size) -> Matrix | None:
    rows, columns = shape[:1].numel(), shape[1:].numel()
    rank = min(config.rank, rows, columns)
    too_large = (rows + columns) * rank * config.min_compression > rows * columns
    return None if len(shape) < 2 or rank == 0 or too_large else Matrix(place, name, shape, rows, columns, rank)


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


def views(flat: torch.Tensor, groups: list[list[Matrix]], rows: str, columns: str) -> list[torch.Tensor]:
    """Cuts a buffer into one tensor for each group of alike matrices; `rows` and `columns` name the sides of its matrices."""
    shapes = [(len(group), getattr(group[0], rows), getattr(group[0], columns)) for group in groups]
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
