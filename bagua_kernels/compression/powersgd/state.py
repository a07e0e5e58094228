"""What PowerSGD's states have in common, however many messages a step has: residuals, factors, and what is made of them.

What is made of averaged factors is equal bit for bit on every device, by elementwise operations in a fixed order. Products
with a rank's own gradient, which no other rank repeats, may be summed in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from bagua_kernels.compression.codec import fold_seed
from bagua_kernels.compression.powersgd.orthonormal import finite, gaussian, name_number, power_of_two
from bagua_kernels.compression.powersgd.stacks import Matrix, Stack, Stacks
from bagua_kernels.launchers.low_rank import KEEP_LEFT, KEEP_NOTHING, KEEP_RIGHT
from bagua_kernels.launchers.multitensor import TensorUpdate


class Settings(Protocol):
    """The attributes of `PowerSGD` that a state needs."""

    @property
    def rank(self) -> int:
        """Columns of a factor."""

    @property
    def seed(self) -> int:
        """Of the first factors."""

    @property
    def min_compression(self) -> float:
        """How many times smaller the factors of a matrix must be."""

    @property
    def warm_start(self) -> bool:
        """True if a step begins with factors of the last one."""


class LowRankState:
    """Residuals and factors of one rank.

    Nothing is kept before `finish`, so a step that broke off is repeated from its first call.

    Attributes:
        dense: indices of the tensors that are not compressed: they are empty, have fewer than two dimensions or would save
            too little. The caller sends them uncompressed.
        step: number of finished steps.
        left_size, right_size: elements of the factors.
        shapes, names: of all tensors.
        dtype, device: of residuals and factors.
    """

    _first = "left"  # the call that a step begins with
    _calls = "`left`, `right`, `finish`"

    def __init__(
        self,
        config: Settings,
        shapes: list[torch.Size],
        names: list[str],
        dtype: torch.dtype,
        device: torch.device,
        before: LowRankState | None = None,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"the state's dtype must be torch.float32 or torch.float64, got {dtype}")
        if len(names) != len(shapes) or len(set(names)) != len(names):
            raise ValueError(f"expected a different name for each of {len(shapes)} shapes, got {names}")
        self.config = config
        self.step = 0
        self.shapes, self.names, self.dtype, self.device = shapes, names, dtype, device
        matrices = _compressed(config, names, shapes)
        self.dense = _others(matrices, len(shapes))
        self.left_size = sum(m.rows * m.rank for m in matrices)
        self.right_size = sum(m.columns * m.rank for m in matrices)
        self._next = self._first
        self._owes: bool = before is not None and before._owes  # True if a residual may be other than zero
        self._small: list[bool] = []  # of the stacks of the step under way: True if no difference can overflow
        self._stacks: Stacks = Stacks(matrices, dtype, device, None if before is None else before._stacks)
        self._draw()

    def compresses_as(self, config: Settings) -> bool:
        """True if another configuration compresses the same tensors."""
        return self.dense == _others(_compressed(config, self.names, self.shapes), len(self.shapes))

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
        into = [[out[m.place] for m in s.matrices] for s in self._stacks.each]
        compiled = [place for place in self._stacks.compiled(into) if self._small[place]]
        found: list[list[bool]] = []
        if self._stacks.passes is not None and compiled:
            found = self._stacks.passes.approximate(self._stacks.memory(), compiled, into, self._keeps)
        self._end_step(dict(zip(compiled, found, strict=True)), into)

    @property
    def updates(self) -> bool:
        """True if `finish_with_updates` works: for float32 on the CPU, by compiled passes."""
        return self._stacks.passes is not None

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
        if self._stacks.passes is None:
            raise RuntimeError(
                "steps with updates are for float32 on the CPU, by compiled passes; call `finish` and then the optimizer"
            )
        for m in (m for s in self._stacks.each for m in s.matrices):
            update = updates.get(m.place)
            if update is None or not update.fits(m.rows * m.columns):
                raise ValueError(
                    f"expected an update of {m.rows * m.columns} float32 elements by an elementwise rule for tensor {m.place} "
                    f"({m.name!r}), got {update}; `Part.from_factors` gives them in the order of its parameters"
                )
        self._take("finish", factor, self._last)
        chosen = [place for place, small in enumerate(self._small) if small]
        by_stack = [[updates[m.place] for m in s.matrices] for s in self._stacks.each]
        found = self._stacks.passes.update(self._stacks.memory(), chosen, by_stack, self._keeps)
        self._end_step(dict(zip(chosen, found, strict=True)), None)

    def _end_step(self, kept: Mapping[int, Sequence[bool]], out: list[list[torch.Tensor]] | None) -> None:
        """Ends a step: writes the output and keeps the factors of the stacks that passes have not finished (`kept`)."""
        for place, s in enumerate(self._stacks.each):
            if place in kept:
                self._stacks.leave(place, kept[place])
            else:
                self._stacks.write_and_take_off(place, None if out is None else out[place])
                self._keep(s)
        self.step += 1
        self._owes = True
        self._next = self._first
        if not self.config.warm_start:
            self._draw()

    @property
    def _last(self) -> torch.Tensor:
        """The factor that a step makes last."""
        return self._stacks.right

    @property
    def _keeps(self) -> int:
        """Which factors the step under way leaves to later ones."""
        return KEEP_RIGHT if self.config.warm_start else KEEP_NOTHING

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiplies the residuals, for gradients that are in another unit from now on."""
        self._stacks.scale(factor)

    @contextmanager
    def withheld(self, places: Sequence[int]) -> Iterator[None]:
        """For a step within this block the residuals of some tensors are zero; then they and the factors are as before.

        Args:
            places: indices of the tensors; those in `dense` have nothing that could be withheld.
        """
        with self._stacks.withheld(places):
            yield

    @torch.no_grad()
    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Adds the residuals to tensors that are sent without compression, and sets them to zero.

        Args:
            tensors: as for a step's first call, which is next; those in `dense` are not touched. Errors as there.
        """
        self._check_tensors("tensors", tensors)
        self._next = self._first
        if self._owes:
            self._stacks.release(tensors)
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
        factors = {
            key: {name: t.clone() for name, t in self._stacks.by_name(kept).items()}
            for key, kept in self._factors_to_save().items()
        }
        return {"step": self.step, "residuals": self._stacks.residuals(), **factors}

    def _factors_to_save(self) -> dict[str, list[torch.Tensor]]:
        """The factors that are kept, by what they are called in `state_dict` and by stack."""
        return {"rights": [s.kept for s in self._stacks.each]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, whatever the order of the tensors; a step under way is forgotten.

        Raises:
            ValueError: the matrices differ in their names or shapes, or the rank differs; nothing is changed then.
        """
        stacks = {"residuals": [s.before for s in self._stacks.each], **self._factors_to_save()}
        targets = {key: self._stacks.by_name(of) for key, of in stacks.items()}
        for key, own in targets.items():
            wanted, found = ({name: tuple(t.shape) for name, t in part.items()} for part in (own, state.get(key, {})))
            differ = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
            if differ:
                raise ValueError(
                    f"{key} of {differ}: expected shapes {[wanted.get(n) for n in differ]}, got "
                    f"{[found.get(n) for n in differ]}; start with the names, shapes, rank and `alternate` that were saved"
                )
        self._stacks.forget_factors()
        for key, own in targets.items():
            for name, target in own.items():
                target.copy_(state[key][name])
        self.step = int(state["step"])
        self._owes = True
        self._next = self._first
        self._draw()

    def _draw(self) -> None:
        self._fill(0 if self.config.warm_start else self.step, [s.drawn for s in self._stacks.each])

    def _fill(self, number: int, stacks: Sequence[torch.Tensor]) -> None:
        """Writes the random numbers of a step to factors, by stack."""
        for s, drawn in zip(self._stacks.each, stacks, strict=True):
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
        if len(tensors) != len(self.shapes):
            raise ValueError(
                f"expected {len(self.shapes)} {what}, as many as `start` was given shapes, got {len(tensors)}"
            )
        own = self._stacks.left
        for m in (m for s in self._stacks.each for m in s.matrices):
            t = tensors[m.place]
            dtypes = {torch.float32, torch.float16, torch.bfloat16, own.dtype}
            if t.shape != m.shape or t.dtype not in dtypes or t.device != own.device:
                raise ValueError(
                    f"{what}[{m.place}] ({m.name!r}): expected shape {tuple(m.shape)}, {own.device}, and one of "
                    f"{sorted(map(str, dtypes))}, got {tuple(t.shape)}, {t.device}, {t.dtype}; convert it or start anew"
                )


def _compressed(config: Settings, names: Sequence[str], shapes: Sequence[torch.Size]) -> list[Matrix]:
    """The tensors that a configuration compresses."""
    found = []
    for place, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        rows, columns = shape[:1].numel(), shape[1:].numel()
        rank = min(config.rank, rows, columns)
        too_large = (rows + columns) * rank * config.min_compression > rows * columns
        if len(shape) > 1 and rank and not too_large:
            found.append(Matrix(place, name, shape, rows, columns, rank))
    return found


def _others(matrices: Sequence[Matrix], count: int) -> tuple[int, ...]:
    """The places of `count` tensors at which no matrix is."""
    return tuple(sorted(set(range(count)) - {m.place for m in matrices}))
