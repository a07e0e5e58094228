"""What a fused step launches: tables over an optimizer's tensors, checked at each step and made anew where they changed."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bagua_kernels.launchers.multitensor import REAL, Table, Variant, needs_tensors
from bagua_kernels.optim.layout import is_dense, is_plain, local, overlaps_itself, steps, turns
from bagua_kernels.optim.watch import Watch, watch
from bagua_kernels.rules.optimizers import ElementwiseRule

if TYPE_CHECKING:
    from bagua_kernels.optim.fused import Fused

Group = dict[str, Any]

GRADIENT = 1


class CannotFuseError(Exception):
    """Why a step must be left to PyTorch."""


@dataclass(frozen=True)
class Update:
    """How an optimizer updates the parameters of a group.

    Attributes:
        rule: its arrays are the parameter, the gradient and the states.
        states: names of the states of the parameter's shape, in the rule's order.
        counters: names of the states of one number. Those that begin with an underscore are not in the optimizer's state: they
            are 1 for a parameter whose states were made for this step, else 0.
    """

    rule: ElementwiseRule
    states: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()

    @property
    def scalars(self) -> int:
        """Number of the rule's scalars."""
        return int(self.rule.function.__code__.co_argcount) - self.rule.arrays


@dataclass(frozen=True)
class Staged:
    """A tensor whose elements lie in another order than the parameter's, and the copy that the kernel works on."""

    index: int
    column: int
    copy: Tensor


@dataclass(frozen=True)
class Entry:
    """A parameter with a gradient.

    Attributes:
        position: its number among all parameters of the optimizer.
        group: its parameter group.
        update: how that is updated.
        extras: names of the extra columns.
        tensors: the columns of the table; of DTensors, the shards.
    """

    position: int
    parameter: Tensor
    state: dict[str, Any]
    group: Group
    update: Update
    extras: tuple[str, ...]
    stochastic: bool
    fresh: bool
    tensors: tuple[Tensor, ...]

    def counter(self, name: str) -> Tensor:
        """The 0-dim tensor of a counter."""
        if name.startswith("_"):
            resident = self.group.get("fused") or self.group.get("capturable")
            device = self.tensors[0].device if resident else "cpu"
            return torch.tensor(float(self.fresh), device=device)
        value = self.state[name]
        return value.detach().reshape(()) if isinstance(value, Tensor) else torch.tensor(float(value))

    def key(self) -> tuple[Any, ...]:
        """What parameters must have in common to be in one launch."""
        dtypes = tuple(REAL.get(t.dtype, t.dtype) for t in self.tensors)
        counters = tuple((c.dtype, c.device) for c in map(self.counter, self.update.counters))
        return self.update, self.extras, self.stochastic, self.tensors[0].device, dtypes, counters


class Launch:
    """The tensors of one kernel launch.

    Attributes:
        params: the parameters.
        spans: each group's part of them: the group, the first and the one after the last.
        variant: the kernel.
        table: the tensors; without gradients between steps, since these are not ours to keep.
        rows: the kernel's scalars.
        counters: each counter of all parameters, of which the states hold 0-dim views.
        positions: the parameters' numbers among all of the optimizer.
    """

    def __init__(self, entries: Sequence[Entry], *, by_address: bool) -> None:
        first = entries[0]
        self.params = [e.parameter for e in entries]
        self.positions = np.array([e.position for e in entries])
        self.plain = all(
            type(t) in (Tensor, torch.nn.Parameter) for e in entries for t in (e.parameter, e.parameter.grad)
        )
        self.variant = Variant(first.update.rule, first.key()[4], first.update.scalars, first.extras, first.stochastic)
        self._complex = first.tensors[0].is_complex()
        self.rows = np.zeros((len(entries), self.variant.width), np.float64 if self.variant.double else np.float32)
        self.spans: list[tuple[Group, int, int]] = []
        for i, e in enumerate(entries):
            if self.spans and self.spans[-1][0] is e.group:
                self.spans[-1] = (e.group, self.spans[-1][1], i + 1)
            else:
                self.spans.append((e.group, i, i + 1))
        self._states = [e.state for e in entries]
        self._names = (None, None, *first.update.states, *first.extras)
        self._share_counters(entries)
        self._lay_out(entries, by_address)

    def _share_counters(self, entries: Sequence[Entry]) -> None:
        """Moves all values of a counter into one tensor, so that one operation advances them."""
        self.counters: dict[str, Tensor] = {}
        self._views: dict[str, list[Tensor]] = {}
        for name in entries[0].update.counters:
            self.counters[name] = torch.stack([e.counter(name) for e in entries])
            if name.startswith("_"):
                continue
            self._views[name] = list(self.counters[name].unbind())
            for e, view in zip(entries, self._views[name], strict=True):
                e.state[name] = view
        self.numbers = {name: flat.numpy() for name, flat in self.counters.items() if not flat.is_cuda}

    def _lay_out(self, entries: Sequence[Entry], by_address: bool) -> None:
        """Makes the table, with copies where a tensor's elements do not lie as the parameter's."""
        columns = [list(column) for column in zip(*(e.tensors for e in entries), strict=True)]
        self._held = {name: [state[name] for state in self._states] for name in self._names if name is not None}
        self._addresses = [[t.data_ptr() for t in column] for column in columns]
        self._forms = [[(t.dtype, steps(t), t.numel()) for t in column] for column in columns]
        self._staged: list[Staged] = []
        kept = [list(column) for column in columns]
        for index, e in enumerate(entries):
            base = e.tensors[0]
            like = base if is_dense(base) else torch.empty(base.shape, dtype=base.dtype, device="meta")
            for column, tensor in enumerate(e.tensors):
                if steps(tensor) != steps(like):
                    copy = torch.empty_strided(base.shape, like.stride(), dtype=tensor.dtype, device=tensor.device)
                    self._staged.append(Staged(index, column, copy))
                    columns[column][index] = copy
        self.table = Table(columns)
        # Most kernels need the addresses alone, but copies are made of tensors.
        by_address = by_address and not needs_tensors(self.table.device)
        self._watchable = self.plain and by_address and not self._staged
        self._watch: Watch | None = None
        self._gradients, kept[GRADIENT] = kept[GRADIENT], []
        self._kept = kept
        self._last = self._addresses[GRADIENT]

    @property
    def precision(self) -> torch.dtype:
        """The dtype of the counters that the states have."""
        return next((self.counters[name].dtype for name in self._views), torch.float32)

    @property
    def on_device(self) -> bool:
        """Whether the counters are on a GPU, where the host must not wait for them."""
        return any(flat.is_cuda for flat in self.counters.values())

    def take(self) -> bool:
        """Takes up this step's gradients. False if anything but their addresses has changed."""
        if self._watch is not None:
            found = self.table.addresses[:, GRADIENT].copy()
            if self._watch.look(found):
                self.table.replace(GRADIENT, found)
                self._gradients = []
                try:
                    return self._has_its_states()
                except KeyError:
                    return False
            # Something has changed, or cannot be told so fast.
            self._watch, self._watchable = None, False
        taken = self._ask()
        if taken and self._watchable:
            self._watch = watch(self.params, [t for tensors in self._held.values() for t in tensors])
            self._watchable = self._watch is not None
        return taken

    def _has_its_states(self) -> bool:
        """Whether the states have the very same tensors under all names."""
        kept = (*self._held.items(), *self._views.items())
        return all(self._still(name, tensors) for name, tensors in kept)

    def _ask(self) -> bool:
        """The same as `take`, by asking PyTorch for each tensor."""
        gradients: list[Any] = [p.grad for p in self.params]
        try:
            if not self.plain:
                gradients = [None if g is None else local(g) for g in gradients]
            if self._complex or any(map(Tensor.is_neg, gradients)):
                gradients = list(map(resolved, gradients))
            addresses = list(map(Tensor.data_ptr, gradients))
            # Gradients that are zero without having memory are at address 0, as empty ones.
            if addresses.count(0) != self._last.count(0) or not self._has_its_states():
                return False
            for column, name in enumerate(self._names):
                tensors = gradients if column == GRADIENT else self.params if name is None else self._held[name]
                if not self.plain and column != GRADIENT:
                    tensors = [local(t) for t in tensors]
                if [(t.dtype, steps(t), t.numel()) for t in tensors] != self._forms[column] or (
                    column != GRADIENT and list(map(Tensor.data_ptr, tensors)) != self._addresses[column]
                ):
                    return False
        except (AttributeError, KeyError, RuntimeError, TypeError):
            # A state is gone; a gradient is None, or sparse and without an address.
            return False
        self._gradients = gradients
        if addresses != self._last:
            self.table.replace(GRADIENT, addresses)
            self._last = addresses
        return True

    def _still(self, name: str, tensors: list[Tensor]) -> bool:
        """Whether the states have the very same tensors under a name."""
        return all(map(operator.is_, [state[name] for state in self._states], tensors))

    def gradient(self, index: int) -> Tensor:
        """The gradient of a parameter, as it is."""
        gradient: Tensor = self._gradients[index]
        return gradient

    def begin(self) -> None:
        """Makes the table ready for the kernel."""
        gradients = list(self._gradients)
        for s in self._staged:
            source = gradients[s.index] if s.column == GRADIENT else self._kept[s.column][s.index]
            s.copy.copy_(source)
            if s.column == GRADIENT:
                gradients[s.index] = s.copy
                self.table.addresses[s.index, GRADIENT] = s.copy.data_ptr()
        self.table.columns[GRADIENT] = gradients

    def end(self) -> None:
        """Brings results home, and lets go of the gradients."""
        for s in self._staged:
            if s.column != GRADIENT:
                self._kept[s.column][s.index].copy_(s.copy)
        self._gradients = self.table.columns[GRADIENT] = []


class Plan:
    """The launches of one step, and what they were made from."""

    def __init__(self, optimizer: Fused) -> None:
        self._groups = list(optimizer.param_groups)
        self._params = [p for group in self._groups for p in group["params"]]
        if len({id(p) for p in self._params}) != len(self._params):
            raise CannotFuseError("a parameter is listed twice")
        entries = list(self._entries(optimizer))
        self._updates = [optimizer._update(group) for group in self._groups]
        self._inactive = [p for p in self._params if p.grad is None]
        self._states = list(optimizer.state.values())
        sets: dict[Any, list[Entry]] = {}
        for turn, entry in zip(turns([e.tensors[0] for e in entries]), entries, strict=True):
            sets.setdefault((turn, entry.key()), []).append(entry)
        self.launches = [
            Launch(sets[key], by_address=optimizer._by_address) for key in sorted(sets, key=lambda key: key[0])
        ]
        self.changed = [e.parameter for e in entries if not e.parameter.is_inference()]

    def _entries(self, optimizer: Fused) -> Iterator[Entry]:
        position = 0
        for group in self._groups:
            fresh = optimizer._prepare(group)
            update = optimizer._update(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    extras, stochastic = optimizer._extra_columns(parameter)
                    names = (*update.states, *extras)
                    state = optimizer.state[parameter] if names or update.counters else {}
                    own = (local(state[name]) for name in names)
                    tensors = (local(parameter), resolved(local(parameter.grad)), *own)
                    check(group, tensors)
                    yield Entry(
                        position, parameter, state, group, update, extras, stochastic, id(parameter) in fresh, tensors
                    )
                position += 1

    def matches(self, optimizer: Fused) -> bool:
        """Whether the launches are still right; if so, they have this step's gradients."""
        groups = optimizer.param_groups
        params = [p for group in groups for p in group["params"]]
        return (
            len(params) == len(self._params)
            and all(map(operator.is_, params, self._params))
            and len(groups) == len(self._groups)
            and all(map(operator.is_, groups, self._groups))
            and [optimizer._update(group) for group in groups] == self._updates
            and not any(p.grad is not None for p in self._inactive)
            and len(optimizer.state) == len(self._states)
            and all(map(operator.is_, optimizer.state.values(), self._states))
            and all(launch.take() for launch in self.launches)
        )


def resolved(gradient: Tensor) -> Tensor:
    """The same values as they are, not as the conjugate or the negation of what lies in memory."""
    return gradient.resolve_conj().resolve_neg() if gradient.layout == torch.strided else gradient


def check(group: Group, tensors: Sequence[Tensor]) -> None:
    """Raises unless a kernel can work on the tensors of one parameter.

    Raises:
        CannotFuseError: PyTorch can, or has an error of its own.
        RuntimeError: elements of the parameter share memory, or a tensor has another shape or device.
    """
    parameter = tensors[0]
    for tensor in tensors:
        if tensor.is_sparse or tensor.layout != torch.strided:
            raise CannotFuseError(f"a gradient is {tensor.layout}")
        if not is_plain(tensor):
            raise CannotFuseError(f"{type(tensor).__name__} has operations of its own")
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            raise CannotFuseError("a tensor is not in memory as it is: a lazy conjugate, negation or zero")
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.device.type not in ("cpu", "cuda"):
            raise CannotFuseError(f"there are no kernels for {tensor.dtype} on {tensor.device}")
        if tensor.shape != parameter.shape or tensor.device != parameter.device:
            raise RuntimeError(
                f"a gradient or state has shape {tuple(tensor.shape)} on {tensor.device}, its parameter "
                f"{tuple(parameter.shape)} on {parameter.device}"
            )
    if group.get("capturable") and not group.get("fused") and parameter.device.type == "cpu":
        raise CannotFuseError("capturable=True is for parameters on a GPU")
    if overlaps_itself(parameter):
        raise RuntimeError(
            f"elements of a parameter of shape {tuple(parameter.shape)} and stride {parameter.stride()} share memory; clone it"
        )
