"""Separates what an earlier pass has left in gradients from what backward adds, for exchanges that take only the latter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass
class _Sum:
    """A gradient to which passes without exchange have added.

    Attributes:
        earlier: the result in it.
        local: what was added.
        shown: the sum, which is `grad`.
        version: of the sum, as long as nobody else writes to it.
    """

    earlier: torch.Tensor
    local: torch.Tensor
    shown: torch.Tensor
    version: int


class Accumulation:
    """Keeps results of earlier exchanges out of gradients while these are exchanged, and adds them afterwards.

    A result stays in `grad` if nobody zeroes it, and backward adds to it. Momentum, a vote or rounding would take it for a
    gradient. So backward adds to nothing, or to what passes without exchange have added, and the result waits beside.

    Attributes:
        strict: True to raise where an increment is not known; otherwise the whole gradient is exchanged.
    """

    def __init__(self, owner: str, strict: bool, in_views: bool = False) -> None:
        """Knows of no result.

        Args:
            owner: of the exchanges, for errors.
            strict: see above.
            in_views: True if other code may have moved a result from one buffer to another, where it is a view.
        """
        self.strict = strict
        self._owner, self._in_views = owner, in_views
        # Where each gradient's last result lies; None where that is not known.
        self._results: dict[torch.Tensor, StorageWeakRef | None] = {}
        self._sums: dict[torch.Tensor, _Sum] = {}
        self._aside: dict[torch.Tensor, torch.Tensor] = {}

    def note(self, parameter: torch.Tensor, place: StorageWeakRef | None) -> None:
        """Stores that a parameter's gradient has become a result, and the memory in which that lies."""
        self._results[parameter] = place

    def move(self, parameter: torch.Tensor, memory: torch.Tensor) -> None:
        """Stores that a result that is known was moved, if the parameter's gradient lies in this memory."""
        gradient, storage = parameter.grad, memory.untyped_storage()
        if parameter in self._results and gradient is not None and gradient.untyped_storage()._cdata == storage._cdata:
            self.note(parameter, StorageWeakRef(storage))

    @property
    def aside(self) -> Collection[torch.Tensor]:
        """The parameters whose results wait."""
        return self._aside.keys()

    def set_aside(self, parameter: torch.Tensor, name: str, copy: bool = False) -> None:
        """Lets a parameter's gradient be what has been added to its last result, before backward adds more.

        Args:
            parameter: whose `grad` becomes None if nothing was added.
            name: for errors.
            copy: True if the result's memory is written to before it is given back.

        Raises:
            RuntimeError: what was added is not known, and that has to be.
        """
        if parameter in self._aside:
            return
        gradient = parameter.grad
        if gradient is None:
            self._results.pop(parameter, None)
            self._sums.pop(parameter, None)
            return
        known = self._sums.pop(parameter, None)
        if known is not None:
            untouched = gradient is known.shown and gradient._version == known.version
            # Old loops zero `grad.data`, which counts no version.
            if untouched and not _is_zero(gradient):
                self._aside[parameter], parameter.grad = known.earlier, known.local
            else:
                self._refuse(parameter, gradient, name)
            return
        if parameter not in self._results:
            # All of it comes from passes without exchange.
            return
        place = self._results.pop(parameter)
        elsewhere = place is not None and place.cdata != gradient.untyped_storage()._cdata
        if elsewhere and not (self._in_views and gradient._is_view()):
            self._refuse(parameter, gradient, name)
        elif not _is_zero(gradient):
            self._aside[parameter] = gradient.detach().clone() if copy else gradient.detach()
            parameter.grad = None

    def _refuse(self, parameter: torch.Tensor, gradient: torch.Tensor, name: str) -> None:
        """Raises if it has to, because other code has written the gradient."""
        # waits: only for gradients that were written by others, on top of a result.
        if self.strict and bool(gradient.any()):
            raise RuntimeError(
                f"the gradient of parameter {name!r} of shape {tuple(parameter.shape)} was replaced or written to after "
                f"{self._owner} had exchanged it, so that what backward adds to that result cannot be separated from it: call "
                "zero_grad() before the next backward pass, or run all but the last pass of a step in no_sync()"
            )

    def gives_back(self, parameter: torch.Tensor, mean: torch.Tensor | None) -> bool:
        """Puts a parameter's earlier result back, if one waits, with the mean of what was added; returns True if it did."""
        earlier = self._aside.pop(parameter, None)
        if earlier is None:
            return False
        parameter.grad = earlier if mean is None else earlier.add_(mean)
        self.note(parameter, StorageWeakRef(earlier.untyped_storage()))
        return True

    def end_local(self, parameter: torch.Tensor) -> None:
        """Puts a result back that a pass without exchange has added to."""
        earlier, local = self._aside.pop(parameter, None), parameter.grad
        if earlier is None:
            return
        if local is None:
            parameter.grad = earlier
            self.note(parameter, StorageWeakRef(earlier.untyped_storage()))
            return
        with torch.no_grad():
            shown = earlier + local.detach()
        self._sums[parameter] = _Sum(earlier, local.detach(), shown, shown._version)
        parameter.grad = shown

    def put_back(self) -> None:
        """Puts all results back, as `end_local` does."""
        for parameter in list(self._aside):
            self.end_local(parameter)

    def forget(self) -> None:
        """Drops everything."""
        self._results, self._sums, self._aside = {}, {}, {}


def _is_zero(gradient: torch.Tensor) -> bool:
    """True if a gradient is known to be zero. On a GPU nobody waits for that: a result of zeros is as good as none."""
    if gradient.device.type != "cpu" or gradient.is_sparse:
        return False
    if gradient.is_complex() or not gradient.numel():
        # waits: for no GPU.
        return not bool(gradient.detach().any())
    # A third of the time that `any` takes.
    low, high = torch.aminmax(gradient.detach())
    # waits: for no GPU.
    return float(low) == 0.0 and float(high) == 0.0


class Accumulates(Protocol):
    """What has parameters."""

    def gradient_coming(self, parameter: torch.Tensor, name: str) -> None:
        """Called when backward is about to add to a parameter's gradient."""


Taker = TypeVar("Taker", bound=Accumulates)


class Watched:
    """Parameters for which `gradient_coming` is called.

    The hooks are on the nodes that accumulate, which are kept alive: `torch.autograd.grad` runs hooks on parameters, too, and
    adds to no gradient.
    """

    def __init__(self, taker: Taker) -> None:
        """Watches nothing; does not keep alive what it calls."""
        self._taker: weakref.ref[Taker] = weakref.ref(taker)
        self._nodes: dict[torch.Tensor, torch.autograd.graph.Node] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def add(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Watches more parameters, given with their names."""
        for name, parameter in parameters:
            if parameter in self._nodes:
                continue
            # A frozen one has no node; the one that it gets here stays, for when it is trained.
            trained = parameter.requires_grad
            node = self._nodes[parameter] = get_gradient_edge(parameter.requires_grad_()).node
            parameter.requires_grad_(trained)
            self._handles.append(node.register_prehook(_coming(self._taker, weakref.ref(parameter), name)))

    def remove(self) -> None:
        """Watches nothing more."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], {}

    def __bool__(self) -> bool:
        return bool(self._nodes)


def _coming(
    taker: weakref.ref[Taker], parameter: weakref.ref[torch.Tensor], name: str
) -> Callable[[tuple[torch.Tensor, ...]], None]:
    def hook(given: tuple[torch.Tensor | None, ...]) -> None:
        alive, own = taker(), parameter()
        # Nothing is added where backward has no gradient, which is None.
        if alive is not None and own is not None and given[0] is not None:
            alive.gradient_coming(own, name)

    return hook
