"""Fusing any elementwise optimizer: its step over many tensors becomes a step over a few flat ones."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import torch
from torch.optim import Optimizer

from bagua_kernels.optim.fuse.elementwise_probe import NotElementwiseError, movable_ids, raw_step, trials
from bagua_kernels.optim.fuse.flat_step import FlatStep
from bagua_kernels.optim.fuse.flat_storage import FlatStorage, move_out
from bagua_kernels.optim.fuse.run import Run, most_elements, runs_of

__all__ = ["NotElementwiseError", "fuse_optimizer"]


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

    During a step, each group's `params` are runs and the parameters that cannot be fused. A run is a flat tensor over
    neighbouring parameters with a gradient and equal step counts. `state` is that of the runs. All of it is put back
    afterwards, so everything that the optimizer writes elsewhere, in its groups and attributes, is written to the right
    place.
    """

    _fuses = True
    # What the number of elements of a flattened tensor is a multiple of; 0 in an instance that was not tried.
    _unit = 0
    _flat_step: FlatStep | None = None
    _storages: dict[Any, FlatStorage] | None = None
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
            flat = self._prepare()
        state, own = self.state, [group["params"] for group in self.param_groups]
        try:
            self.state = flat.state
            # What is not a parameter's belongs to the optimizer as a whole.
            flat.state.update({key: value for key, value in state.items() if not isinstance(key, torch.Tensor)})
            for group, params in zip(self.param_groups, flat.groups, strict=True):
                group["params"] = params
            return base_step(self, *args, **kwargs)
        finally:
            self.state = state
            for group, params in zip(self.param_groups, own, strict=True):
                group["params"] = params
            with torch.no_grad():
                flat.publish(state)

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

        The next step moves them back. What shares memory with other processes, or resizes it, needs that.
        """
        for storage in (self._storages or {}).values():
            for p, view, grad_view in zip(storage.params, storage.views, storage.grad_views, strict=True):
                # What has been moved by others since has its own storage.
                if p.is_set_to(view):
                    move_out(p, self.state)
                if p.grad is not None and p.grad.is_set_to(grad_view):
                    p.grad = p.grad.clone()
        self._storages = self._flat_step = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unpickled, (_base(self), self._unit), self.__getstate__()

    def _prepare(self) -> FlatStep:
        """Gathers gradients into flat storage; prepares anew where the last step's facts no longer hold."""
        params = [p for group in self.param_groups for p in group["params"]]
        grads = [p.grad for p in params]
        ready = [
            g is not None and g.layout is torch.strided and g.dtype is p.dtype and not g.requires_grad
            for p, g in zip(params, grads, strict=True)
        ]
        flat = self._flat_step
        if flat is None or not flat.holds(params, ready, self.state):
            flat = self._flat_step = self._new_flat_step(params, ready)
        flat.gather(params, grads)
        return flat

    def _new_flat_step(self, params: list[torch.Tensor], ready: list[bool]) -> FlatStep:
        owned = set[int]().union(*(storage.owned for storage in (self._storages or {}).values()))
        movable = movable_ids(params, owned)
        has_gradient = {id(p) for p, there in zip(params, ready, strict=True) if there}
        storages: dict[Any, FlatStorage] = {}
        groups, runs = [], []
        for index, group in enumerate(self.param_groups):
            kinds: dict[Any, list[torch.Tensor]] = {}
            for p in group["params"]:
                suits = p.numel() % self._unit == 0 and 4 * p.numel() <= most_elements(p.device)
                # One whose gradient is sparse, for example, must not even be a view, see `move_out`.
                wanted = id(p) in has_gradient or (p.requires_grad and p.grad is None)
                if suits and wanted and id(p) in movable:
                    kinds.setdefault((index, p.dtype, p.device), []).append(p)
            fused: list[Run] = []
            for kind, members in kinds.items():
                if len(members) > 1:
                    old = (self._storages or {}).get(kind)
                    storages[kind] = old if old is not None and old.holds(members) else FlatStorage(members)
                    fused += runs_of(storages[kind], self.state, has_gradient)
            inside = {id(p) for run in fused for p in run.params}
            groups.append([*(run.tensor for run in fused), *(p for p in group["params"] if id(p) not in inside)])
            runs += fused
        staying = {id(p) for storage in storages.values() for p in storage.params}
        for storage in (self._storages or {}).values():
            for p in storage.params:
                if id(p) not in staying and p.untyped_storage().data_ptr() in owned:
                    move_out(p, self.state)
        self._storages = storages
        return FlatStep(params, ready, groups, runs, self.state)


def _base(optimizer: Any) -> type[Optimizer]:
    order = type(optimizer).__mro__
    return order[order.index(FusedStep) + 1]


def _unpickled(base: Any, unit: int) -> Optimizer:
    optimizer = object.__new__(fused_class(base))
    vars(optimizer)["_unit"] = unit
    return optimizer
