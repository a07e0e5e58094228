"""The tensors of one kernel launch: where they lie, checked at each step."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import call, is_, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_kernels.bucket import dense_strides
from bagua_kernels.launchers.multitensor import GRADIENT, SCALARS, Table, Variant, needs_tensors
from bagua_kernels.optim.step.entry import Entry
from bagua_kernels.optim.step.shards import local, resolved, shard_of_gradient
from bagua_kernels.optim.step.strides import steps
from bagua_kernels.optim.step.update import Group
from bagua_kernels.optim.watch import Watch, watch


class Launch:
    """The tensors of one kernel launch.

    Gradients and states are the user's to free between steps, so the launch keeps none of them alive, but for its counters. A
    state is recognised as the same object: a counter by the tensor that is kept, any other by a weak reference, which a new
    tensor at a freed address does not satisfy.

    Attributes:
        params: the parameters.
        spans: each group's part of them: the group, the first and the one after the last.
        states: the state of each.
        names: the state in each column of the table; empty for parameter and gradient.
        variant: the kernel.
        scalars: the names of the rule's scalars, in its order.
        in_order: puts scalars by name into that order; None before the first step, which checks their names.
        table: the tensors. Its columns are filled during a step, and only where they are read.
        rows: the kernel's scalars.
        counters: each counter of all parameters. The states' tensors lie in it, except those in shared memory.
        positions: the parameters' numbers among all of the optimizer.
        missing: which parameters have no gradient in this step; None if all have one.
        staged: the cells of the table whose elements do not lie as the parameter's, so that kernels work on copies.
    """

    def __init__(self, entries: Sequence[Entry], *, by_address: bool) -> None:
        first = entries[0]
        self.params = [e.parameter for e in entries]
        self.positions = np.array([e.position for e in entries])
        self.scalars = first.update.scalars
        self.variant = Variant(first.update.rule, first.dtypes, len(self.scalars), first.extras, first.stochastic)
        self.rows = np.zeros((len(entries), self.variant.width), np.float64 if self.variant.double else np.float32)
        self.in_order: Callable[[Mapping[str, Any]], Sequence[Any]] | None = None
        self.missing: np.ndarray[Any, Any] | None = None
        self.spans: list[tuple[Group, int, int]] = []
        for i, e in enumerate(entries):
            if self.spans and self.spans[-1][0] is e.group:
                self.spans[-1] = (e.group, self.spans[-1][1], i + 1)
            else:
                self.spans.append((e.group, i, i + 1))
        self._plain = all(type(t) in (Tensor, torch.nn.Parameter) for e in entries for t in (e.parameter, e.tensors[1]))
        self._complex = first.tensors[0].is_complex()
        self.states = [e.state for e in entries]
        self.names = ("", "", *first.update.states, *first.extras)
        self._share_counters(entries)
        self._lay_out(entries, by_address)

    def _share_counters(self, entries: Sequence[Entry]) -> None:
        """Brings all values of a counter into one tensor, so that one operation advances them."""
        self.counters: dict[str, Tensor] = {}
        # Those that other processes may use stay where they are. Each step copies them here and back.
        self._elsewhere: set[str] = set()
        self._views: dict[str, list[Tensor]] = {}
        for name in entries[0].counters:
            if name.startswith("_"):
                device = entries[0].kind_of(name)[1]
                # waits: when a launch is made.
                self.counters[name] = torch.tensor(
                    [float(e.fresh) for e in entries], dtype=torch.float32, device=device
                )
                continue
            values = [e.state[name] for e in entries]
            flat = joined(values)
            if flat is None:
                dtype = entries[0].kind_of(name)[0]
                values = [torch.as_tensor(v, dtype=dtype) for v in values]
                flat = torch.stack([v.detach().reshape(()) for v in values])
                if any(map(is_shared, values)):
                    self._elsewhere.add(name)
                else:
                    values = moved(values, flat)
                for e, value in zip(entries, values, strict=True):
                    e.state[name] = value
            self.counters[name] = flat
            self._views[name] = [e.state[name] for e in entries]

    def _lay_out(self, entries: Sequence[Entry], by_address: bool) -> None:
        """Makes the table, and notes which tensors' elements do not lie as the parameter's, so that copies are needed."""
        columns = [list(column) for column in zip(*(e.tensors for e in entries), strict=True)]
        self._addresses = [[t.data_ptr() for t in column] for column in columns]
        self._formats = [list(map(memory_format, column)) for column in columns]
        self._strides = [dense_strides(e.tensors[0]) for e in entries]
        self.staged = [
            (index, column)
            for index, e in enumerate(entries)
            for column, tensor in enumerate(e.tensors)
            if steps(tensor) != steps(tensor, self._strides[index])
        ]
        self.table = Table(columns)
        self.table.release()
        # Most kernels need the addresses alone; but copies are made of tensors.
        self._reads_tensors = not by_address or needs_tensors(self.table.device) or bool(self.staged)
        self._skips = by_address
        self._watchable = self._plain and not self._reads_tensors and not self._complex
        self._watch: Watch | None = None
        self._gradients: list[Any] = [e.tensors[GRADIENT] for e in entries]
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._known = {n: [weakref.ref(state[n]) for state in self.states] for n in filter(None, self.names)}

    @property
    def precision(self) -> torch.dtype:
        """The dtype of the counters that the states have."""
        return next((views[0].dtype for views in self._views.values()), torch.float32)

    @property
    def on_device(self) -> bool:
        """True if the counters are on a GPU, where the host must not wait for them."""
        return any(flat.is_cuda for flat in self.counters.values())

    def column(self, scalar: str) -> int:
        """The column of `rows` that holds a scalar of the rule."""
        return SCALARS + self.scalars.index(scalar)

    def counts(self) -> dict[str, Tensor]:
        """The counters with the values that they have by now."""
        for name in self._elsewhere:
            self.counters[name].copy_(torch.stack(self._scalars_of(name)))
        return self.counters

    def numbers(self) -> dict[str, np.ndarray[Any, Any]]:
        """The current counters as arrays over their memory, wherever that is by now."""
        return {name: flat.numpy() for name, flat in self.counts().items()}

    def count(self, counted: Mapping[str, Any]) -> None:
        """Sets the counters, to arrays or tensors."""
        for name, values in counted.items():
            self.counters[name].copy_(torch.as_tensor(values))
            if name in self._elsewhere:
                torch._foreach_copy_(self._scalars_of(name), list(self.counters[name].unbind()))

    def _scalars_of(self, counter: str) -> list[Tensor]:
        """The states' tensors of a counter, without dimensions."""
        return [view.detach().reshape(()) for view in self._views[counter]]

    def take(self) -> bool:
        """Reads this step's gradients. Returns False if anything else has changed."""
        try:
            # Another backend, which `BAGUA_KERNELS_BACKEND` can name at any step, may read the tensors that a table has released.
            if needs_tensors(self.table.device) and not self._reads_tensors:
                return False
            if not self._recognised():
                return False
            if self._watch is not None:
                addresses = np.empty(len(self.params), np.int64)
                missing = np.zeros(len(self.params), bool)
                if self._watch.look(addresses, missing):
                    self.missing = missing if missing.any() else None
                    self.table.replace(GRADIENT, addresses)
                    return self._hold(addresses)
                self._watch = None
            taken = self._ask()
        except (AttributeError, KeyError, RuntimeError, TypeError):
            # A state is gone; a gradient is sparse and without an address.
            return False
        if taken and self._watchable and self.missing is None:
            states = [s[n] for n in filter(None, self.names) for s in self.states]
            self._watch = watch(self.params, [*states, *itertools.chain(*self._views.values())])
            self._watchable = self._watch is not None
        return taken

    def _recognised(self) -> bool:
        """Whether the states still have the tensors that they had when the launch was made: the same objects."""
        return all(
            all(map(is_, map(itemgetter(name), self.states), views)) for name, views in self._views.items()
        ) and all(
            all(map(is_, map(itemgetter(name), self.states), map(call, known))) for name, known in self._known.items()
        )

    def _hold(self, addresses: np.ndarray[Any, Any]) -> bool:
        """Keeps the gradients alive until the kernel has read them, where another thread could free them meanwhile."""
        if len(sys._current_frames()) == 1:
            return True
        held = self._gradients = [p.grad for p in self.params]
        known: list[int] = addresses.tolist()
        if self.missing is None:
            # A gradient that has gone meanwhile raises a TypeError, which `take` knows.
            return list(map(Tensor.data_ptr, held)) == known
        return [0 if g is None else g.data_ptr() for g in held] == known

    def _ask(self) -> bool:
        """The same as a look, by asking PyTorch for each tensor."""
        gradients: list[Any] = [p.grad for p in self.params]
        missing = np.array([g is None for g in gradients])
        self.missing = missing if missing.any() else None
        if self.missing is not None and not self._skips:
            return False
        for i, (p, g) in enumerate(zip(self.params, gradients, strict=True)):
            if g is not None and not self._plain:
                gradients[i] = shard_of_gradient(p, g)
        if self._complex or any(g is not None and g.is_neg() for g in gradients):
            gradients = [None if g is None else resolved(g) for g in gradients]
        # What shared memory holds is read anew in each step.
        within = [name for name in self._views if name not in self._elsewhere]
        if not all(_joins(self._views[name], self.counters[name]) for name in within):
            return False
        addresses = [0 if g is None else g.data_ptr() for g in gradients]
        for column, name in enumerate(self.names):
            formats = self._formats[column]
            if column == GRADIENT:
                # A gradient that is zero without having memory is at address 0.
                if any(
                    g is not None and (not fits(g, f) or (not a and g.numel()))
                    for g, f, a in zip(gradients, formats, addresses, strict=True)
                ):
                    return False
                continue
            tensors = self._current(name)
            if [t.data_ptr() for t in tensors] != self._addresses[column] or not all(map(fits, tensors, formats)):
                return False
        self._gradients = gradients
        self.table.replace(GRADIENT, addresses)
        return True

    def _current(self, name: str) -> list[Tensor]:
        """The parameters, or a state of each."""
        tensors = self.params if not name else [state[name] for state in self.states]
        return tensors if self._plain else list(map(local, tensors))

    def gradient(self, index: int) -> Tensor:
        """The gradient of a parameter, as it is. Not for launches by address."""
        gradient: Tensor = self._gradients[index]
        return gradient

    def begin(self) -> None:
        """Makes the table ready for the kernel."""
        if not self._reads_tensors:
            return
        columns = [self._gradients if i == GRADIENT else self._current(n) for i, n in enumerate(self.names)]
        # What is not there is not read.
        columns[GRADIENT] = [p if g is None else g for p, g in zip(columns[0], columns[GRADIENT], strict=True)]
        columns = [list(column) for column in columns]
        for index, column in self.staged:
            if self.missing is None or not self.missing[index]:
                tensor = columns[column][index]
                copy = torch.empty_strided(
                    tensor.shape, self._strides[index], dtype=tensor.dtype, device=tensor.device
                ).copy_(tensor)
                columns[column][index] = copy
                if column != GRADIENT:
                    self._copies.append((tensor, copy))
        self.table.fill(columns)

    def store(self) -> None:
        """Brings the results home that the kernel has written to copies."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)

    def end(self) -> None:
        """Drops the references to gradients and states."""
        self._gradients, self._copies = [], []
        if self._reads_tensors:
            self.table.release()


def memory_format(tensor: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    """What a kernel assumes of a tensor beside its address: dtype, shape and strides."""
    return tensor.dtype, tensor.shape, tensor.stride()


def fits(tensor: Tensor, known: tuple[torch.dtype, torch.Size, tuple[int, ...]]) -> bool:
    """True if a tensor has a memory format, except for strides that do not matter."""
    dtype, shape, strides = known
    if tensor.dtype != dtype or tensor.shape != shape:
        return False
    return tensor.stride() == strides or steps(tensor) == steps(tensor, strides)


def is_shared(value: Tensor) -> bool:
    """True if a tensor is in memory that other processes can use. On a GPU `Tensor.is_shared` is always True."""
    return value.device.type == "cpu" and value.is_shared()


def moved(values: Sequence[Tensor], whole: Tensor) -> list[Tensor]:
    """Moves tensors of one element into the memory of a vector, in order.

    They stay the same objects, since another optimizer or the user may hold them. Objects that cannot move, and those listed
    before, are replaced by views of the vector.
    """
    found: dict[int, Tensor] = {}
    for index, (value, view) in enumerate(zip(values, whole.unbind(), strict=True)):
        movable = type(value) is Tensor and not value.is_inference() and id(value) not in found
        kept = value.set_(whole.untyped_storage(), index, value.shape, value.stride()) if movable else view
        found[id(kept)] = kept
    return list(found.values())


def joined(values: Sequence[Any]) -> Tensor | None:
    """The tensor of which the values are all elements in order; None if they are not."""
    first = values[0]
    if not isinstance(first, Tensor) or first.untyped_storage().nbytes() != len(values) * first.element_size():
        return None
    if not all(isinstance(v, Tensor) and v.dtype == first.dtype and v.dim() == 0 for v in values):
        return None
    whole: Tensor = torch.empty(0, dtype=first.dtype, device=first.device)
    whole.set_(first.untyped_storage(), 0, (len(values),), (1,))
    return whole if _joins(values, whole) else None


def _joins(views: Sequence[Tensor], whole: Tensor) -> bool:
    """True if the views of dtype and shape of an element are all elements of a vector, in order.

    Addresses tell this, since the vector is alive: nothing else can be in its memory.
    """
    begin, step = whole.data_ptr(), whole.element_size()
    return list(map(Tensor.data_ptr, views)) == list(range(begin, begin + step * len(views), step))
