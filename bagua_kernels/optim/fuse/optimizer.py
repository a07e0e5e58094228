"""Fusing any elementwise optimizer: its step over many tensors becomes a step over a few flat ones."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from bagua_kernels.optim.fuse.elementwise_probe import NotElementwiseError, movable_ids, padded, raw_step, trials

__all__ = ["NotElementwiseError", "fuse_optimizer"]

_PLAIN = (bool, int, float, complex, str, type(None))


def fuse_optimizer(optimizer: Optimizer) -> Optimizer:
    """Makes an optimizer step over a few flat tensors in place of many small ones, with the same results.

    The optimizer is changed in place: at its first step its parameters, their gradients and its state move into flat storage, of
    which they become views. `param_groups`, `state`, `state_dict()` and hooks stay as they are.

    Args:
        optimizer: an instance of any subclass of `torch.optim.Optimizer` that treats each element on its own. This is found out
            with a few steps on small synthetic tensors.

    Returns:
        The same object, now of a subclass of its class. Optimizers of `bagua_kernels.optim` are returned as they are.

    Raises:
        NotElementwiseError: the optimizer is not elementwise, needs its closure more than once, or failed in the trial.
        TypeError: the argument is not an optimizer.
        ValueError: something has replaced the `step` of this instance.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"fuse_optimizer takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if getattr(type(optimizer), "_fuses", False):
        return optimizer
    patched = vars(optimizer).get("step")
    if patched is not None and not hasattr(patched, "_wrapped_by_lr_sched"):
        raise ValueError("the step of this optimizer was replaced on the instance; call fuse_optimizer before that")
    base: Any = type(optimizer)
    unit = max(trials(optimizer, optimizer.param_groups, base, fused_class(base)))
    optimizer.__class__ = fused_class(base)
    vars(optimizer)["_unit"] = unit
    optimizer._patch_step_function()
    if patched is not None:
        # The scheduler's wrapper calls the class's step as it was before.
        @functools.wraps(patched)
        def step(*args: Any, **kwargs: Any) -> Any:
            vars(optimizer)["_opt_called"] = True
            return type(optimizer).step(optimizer, *args, **kwargs)

        optimizer.step = step  # type: ignore[method-assign]
    return optimizer


@functools.cache
def fused_class(base: Any) -> type[Optimizer]:
    """The subclass of an optimizer's class whose instances step over flat tensors."""
    return type(f"Fused{base.__name__}", (FusedStep, base), {"__module__": base.__module__, "__doc__": base.__doc__})


class FusedStep:
    """What fused optimizers have in front of the optimizer's own class in their method resolution order.

    During a step, each group's `params` are runs, flat tensors that cover neighbouring parameters with a gradient and equal step
    counts, and the parameters that cannot be fused; `state` is that of the runs. All of it is put back afterwards, so everything
    that the optimizer writes elsewhere, in its groups and attributes, is written to the right place.
    """

    _fuses = True
    # What the number of elements of a flattened tensor is a multiple of; 0 in an instance that was not tried.
    _unit = 0
    _plan: Plan | None = None
    _layouts: dict[Any, Layout] | None = None
    param_groups: list[dict[str, Any]]
    state: defaultdict[Any, Any]

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Performs one step, as the optimizer's class does."""
        base_step = raw_step(_base(self))  # Its hooks run around this method.
        if not self._unit:
            return base_step(self, *args, **kwargs)
        closure = args[0] if args else kwargs.get("closure")
        if callable(closure):
            # It makes the gradients, which are to be gathered before the optimizer looks at them.
            with torch.enable_grad():
                loss = closure()
            args, kwargs = ((lambda: loss, *args[1:]), kwargs) if args else (args, {**kwargs, "closure": lambda: loss})
        with torch.no_grad():
            plan = self._prepare()
        state, own = self.state, [group["params"] for group in self.param_groups]
        try:
            self.state = plan.state
            # What is not a parameter's belongs to the optimizer as a whole.
            plan.state.update({key: value for key, value in state.items() if not isinstance(key, torch.Tensor)})
            for group, params in zip(self.param_groups, plan.groups, strict=True):
                group["params"] = params
            return base_step(self, *args, **kwargs)
        finally:
            self.state = state
            for group, params in zip(self.param_groups, own, strict=True):
                group["params"] = params
            with torch.no_grad():
                plan.publish(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as the optimizer's class does, unless that is not elementwise with the options of the group."""
        super().add_param_group(param_group)  # type: ignore[misc]
        if self._unit:
            try:
                found = trials(self, self.param_groups[-1:], _base(self), type(self))  # type: ignore[arg-type]
            except NotElementwiseError:
                self.param_groups.pop()
                raise
            self._unit = max(self._unit, *found)

    @torch.no_grad()
    def unflatten(self) -> None:
        """Moves parameters, their gradients and states out of flat storage, each into storage of its own.

        The next step moves them back. Libraries that write storages, such as safetensors, refuse tensors that share one.
        """
        for layout in (self._layouts or {}).values():
            for p, view, grad_view in zip(layout.params, layout.views, layout.grad_views, strict=True):
                # What has been moved by others since has its own storage.
                if p.is_set_to(view):
                    _move_out(p, self.state)
                if p.grad is not None and p.grad.is_set_to(grad_view):
                    p.grad = p.grad.clone()
        self._layouts = self._plan = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unpickled, (_base(self), self._unit), self.__getstate__()

    def _prepare(self) -> Plan:
        """Gathers gradients into flat storage; makes a new plan where the last one's facts no longer hold."""
        params = [p for group in self.param_groups for p in group["params"]]
        grads = [p.grad for p in params]
        ready = [
            g is not None and g.layout is torch.strided and g.dtype is p.dtype and not g.requires_grad
            for p, g in zip(params, grads, strict=True)
        ]
        plan = self._plan
        if plan is None or not plan.holds(params, ready, self.state):
            plan = self._plan = self._new_plan(params, ready)
        plan.gather(params, grads)
        return plan

    def _new_plan(self, params: list[torch.Tensor], ready: list[bool]) -> Plan:
        owned = {layout.flat.untyped_storage().data_ptr() for layout in (self._layouts or {}).values()}
        movable = movable_ids(params, owned)
        has_gradient = {id(p) for p, there in zip(params, ready, strict=True) if there}
        layouts: dict[Any, Layout] = {}
        groups, runs = [], []
        for index, group in enumerate(self.param_groups):
            kinds: dict[Any, list[torch.Tensor]] = {}
            for p in group["params"]:
                suits = p.numel() % self._unit == 0 and 4 * p.numel() <= _most(p.device)
                # One whose gradient is sparse, for example, must not even be a view, see `_move_out`.
                wanted = id(p) in has_gradient or (p.requires_grad and p.grad is None)
                if suits and wanted and id(p) in movable:
                    kinds.setdefault((index, p.dtype, p.device), []).append(p)
            fused: list[Run] = []
            for kind, members in kinds.items():
                if len(members) > 1:
                    old = (self._layouts or {}).get(kind)
                    layouts[kind] = old if old is not None and old.holds(members) else Layout(members)
                    fused += _runs(layouts[kind], self.state, has_gradient)
            inside = {id(p) for run in fused for p in run.params}
            groups.append([*(run.tensor for run in fused), *(p for p in group["params"] if id(p) not in inside)])
            runs += fused
        staying = {id(p) for layout in layouts.values() for p in layout.params}
        for layout in (self._layouts or {}).values():
            for p in layout.params:
                if id(p) not in staying and p.untyped_storage().data_ptr() in owned:
                    _move_out(p, self.state)
        self._layouts = layouts
        return Plan(params, ready, groups, runs, self.state)


class Layout:
    """Flat storage for parameters of one group, dtype and device, for their gradients and their state, and views of it for each.

    Parameter `i` begins at `offsets[i]`; the last offset is the end of the padding behind the last parameter.
    """

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.params = params
        self.offsets = [0, *itertools.accumulate(padded(p) for p in params)]
        self.flat, self.views = self._buffer(params[0])
        self.grad, self.grad_views = self._buffer(params[0])
        self._states: dict[Any, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        for p, view in zip(params, self.views, strict=True):
            view.copy_(p.detach())
            p.data = view  # One by one, so that each parameter's old storage is free for what comes next.

    def holds(self, params: list[torch.Tensor]) -> bool:
        """Whether these are the layout's parameters and still lie in it."""
        return _same(params, self.params) and all(map(torch.Tensor.is_set_to, params, self.views))

    def state(self, key: Any, like: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Flat storage for one entry of the state, of the dtype and on the device of a tensor, and its views."""
        kind = (key, like.dtype, like.device)
        if kind not in self._states:
            self._states[kind] = self._buffer(like)
        return self._states[kind]

    def _buffer(self, like: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        flat = torch.zeros(self.offsets[-1], dtype=like.dtype, device=like.device)
        offsets = self.offsets[:-1]
        return flat, [flat.as_strided(p.shape, p.stride(), at) for p, at in zip(self.params, offsets, strict=True)]


class Run:
    """Neighbours in a layout that are stepped as one flat tensor: their states have the same keys and equal scalars.

    `tensor` is what the optimizer sees in their place, and `kept` what is in its state, None where it has no state yet. `stacks`
    holds, for each entry that is a scalar, a copy for each parameter.
    """

    def __init__(self, layout: Layout, first: int, last: int, state: defaultdict[Any, Any]) -> None:
        self.layout, self.members = layout, slice(first, last)
        self.params = layout.params[self.members]
        self.span = slice(layout.offsets[first], layout.offsets[last])
        self.tensor = torch.nn.Parameter(layout.flat[self.span])
        self.tensor.grad = layout.grad[self.span]
        self.stacks: dict[Any, torch.Tensor] = {}
        self.kept: dict[Any, Any] | None = None
        if self.params[0] in state:
            self.kept = {}
            for key, value in list(state[self.params[0]].items()):
                if isinstance(value, torch.Tensor) and value.shape == self.params[0].shape:
                    flat, views = layout.state(key, value)
                    for p, view in zip(self.params, views[self.members], strict=True):
                        if state[p][key] is not view:
                            view.copy_(state[p][key])
                            state[p][key] = view
                    self.kept[key] = flat[self.span]
                else:
                    self._adopt(key, value.clone() if isinstance(value, torch.Tensor) else value, state)

    def publish(self, new: dict[Any, Any], state: defaultdict[Any, Any]) -> None:
        """Brings what the optimizer left in the run's state into the states of the parameters."""
        if self.kept is None:
            self.kept = {}
            for p in self.params:
                state[p] = {}
        for key in self.kept.keys() - new.keys():
            del self.kept[key]
            self.stacks.pop(key, None)
            for p in self.params:
                del state[p][key]
        for key, value in list(new.items()):
            kept: Any = self.kept.get(key)
            if value is kept and key in self.kept and key not in self.stacks:
                continue
            tensors = isinstance(value, torch.Tensor) and isinstance(kept, torch.Tensor)
            if tensors and (value.shape, value.dtype, value.device) == (kept.shape, kept.dtype, kept.device):
                if value is not kept:
                    new[key] = kept.copy_(value)
                if key in self.stacks:
                    self.stacks[key].copy_(kept)
            else:
                new[key] = self._adopt(key, value, state)

    def _adopt(self, key: Any, value: Any, state: defaultdict[Any, Any]) -> Any:
        """Makes an entry of the run's state one of the parameters' states; returns what takes its place in the run's."""
        assert self.kept is not None
        values: Iterable[Any]
        self.stacks.pop(key, None)
        if isinstance(value, torch.Tensor) and value.shape == self.tensor.shape:
            flat, views = self.layout.state(key, value)
            value, values = flat[self.span].copy_(value), views[self.members]
        elif isinstance(value, torch.Tensor) and value.numel() == 1:
            # A copy each: parameters may come to differ, and in the unfused optimizer none of them shares its counter.
            self.stacks[key] = value.detach().repeat(len(self.params), *(1,) * value.ndim)
            values = [self.stacks[key][i] for i in range(len(self.params))]
        elif isinstance(value, _PLAIN):
            values = itertools.repeat(value)
        else:
            raise RuntimeError(f"state[{key!r}] is neither elements' nor a whole parameter's: {type(value).__name__}")
        self.kept[key] = value
        for p, own in zip(self.params, values, strict=False):
            state[p][key] = own
        return value


class Plan:
    """What a step does: `groups` and `state` take the place of the optimizer's own; and the facts that this relies on."""

    def __init__(
        self, params: list[torch.Tensor], ready: list[bool], groups: list[Any], runs: list[Run], state: Any
    ) -> None:
        self._params, self._ready, self.groups, self.runs = params, ready, groups, runs
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        self.state.update({run.tensor: dict(run.kept) for run in runs if run.kept is not None})
        self.state.update({p: state[p] for group in groups for p in group if p in state})
        self.fused = [p for run in runs for p in run.params]
        self._views = [view for run in runs for view in run.layout.views[run.members]]
        inside = {id(p) for p in self.fused}
        self._others = [p for p in params if id(p) not in inside]
        self._pointers = [p.data_ptr() for p in self._others]
        views = {id(p): v for run in runs for p, v in zip(run.params, run.layout.grad_views[run.members], strict=True)}
        self._slots = [(i, views[id(p)]) for i, p in enumerate(params) if id(p) in views]
        self._note(state)

    def holds(self, params: list[torch.Tensor], ready: list[bool], state: defaultdict[Any, Any]) -> bool:
        """Whether nothing has changed since the last step that this plan relies on."""
        return (
            ready == self._ready
            and _same(params, self._params)
            and all(map(torch.Tensor.is_set_to, self.fused, self._views))
            and [p.data_ptr() for p in self._others] == self._pointers
            and _same(_entries(state), self._entries)
            and all(run.stacks[key]._version == version for run, key, version in self._versions)
        )

    def gather(self, params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """Copies the gradients that do not lie in flat storage there."""
        elsewhere = [(i, view) for i, view in self._slots if not view.is_set_to(grads[i])]
        # A gradient in the view's own memory, with other strides, would change while it is read.
        sources = [grads[i].clone() if grads[i].data_ptr() == view.data_ptr() else grads[i] for i, view in elsewhere]
        if elsewhere:
            torch._foreach_copy_([view for _, view in elsewhere], sources)
        for i, view in elsewhere:
            # A view is part of somebody's buffer, such as a bucket, who expects to find it again.
            if not grads[i]._is_view():
                params[i].grad = view

    def publish(self, state: defaultdict[Any, Any]) -> None:
        """Brings the state after a step to where the user sees it."""
        tensors = {run.tensor for run in self.runs}
        for run in self.runs:
            if run.tensor in self.state:
                run.publish(self.state[run.tensor], state)
        state.update({key: value for key, value in self.state.items() if key not in tensors})
        if self.fused:
            # Autograd is to see that what it saved for backward is no longer what it was.
            torch.autograd.graph.increment_version(self.fused)
        self._note(state)

    def _note(self, state: defaultdict[Any, Any]) -> None:
        self._entries = _entries(state)
        self._versions = [(run, key, stack._version) for run in self.runs for key, stack in run.stacks.items()]


def _runs(layout: Layout, state: defaultdict[Any, Any], has_gradient: set[int]) -> list[Run]:
    """Splits a layout into the longest runs whose parameters can be stepped together."""
    runs = []
    first, end = 0, len(layout.params)
    most = _most(layout.flat.device)
    signatures = [_signature(p, state) if id(p) in has_gradient else None for p in layout.params]
    for last in range(1, end + 1):
        fits = last < end and layout.offsets[last + 1] - layout.offsets[first] <= most
        if fits and signatures[last] == signatures[first]:
            continue
        if signatures[first] is not None and last - first > 1:
            runs.append(Run(layout, first, last, state))
        first = last
    return runs


def _most(device: torch.device) -> int:
    """Elements that a run has at most: on a CPU, the results of an optimizer's many operations should not leave the cache."""
    return 1 << 17 if device.type == "cpu" else sys.maxsize


def _signature(p: torch.Tensor, state: defaultdict[Any, Any]) -> Any:
    """What the states of two parameters must have in common to be flattened; None where a state cannot be."""
    if p not in state:
        return "new"
    signature: list[tuple[Any, ...]] = []
    for key, value in state[p].items():
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or (value.shape != p.shape and value.numel() != 1):
                return None
            scalar = None if value.shape == p.shape else (value.shape, value.item())
            signature.append((key, value.dtype, value.device, scalar))
        elif isinstance(value, _PLAIN):
            signature.append((key, type(value), value))
        else:
            return None
    return frozenset(signature)


def _move_out(p: torch.Tensor, state: defaultdict[Any, Any]) -> None:
    """Gives a parameter and its state storage of their own: PyTorch 2.13 adds sparse gradients to views in the wrong place."""
    p.data = p.detach().clone()
    for key, value in state.get(p, {}).items():
        if isinstance(value, torch.Tensor):
            state[p][key] = value.clone()


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects."""
    return len(left) == len(right) and all(map(operator.is_, left, right))


def _entries(state: defaultdict[Any, Any]) -> list[Any]:
    """The entries of all states, to find any that was replaced."""
    return list(itertools.chain.from_iterable(s.values() if type(s) is dict else (s,) for s in state.values()))


def _base(optimizer: Any) -> type[Optimizer]:
    order = type(optimizer).__mro__
    return order[order.index(FusedStep) + 1]


def _unpickled(base: Any, unit: int) -> Optimizer:
    optimizer = object.__new__(fused_class(base))
    vars(optimizer)["_unit"] = unit
    return optimizer
