"""One step over flat tensors: what takes the place of an optimizer's groups and state, and what that relies on."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import torch

from bagua_kernels.optim.fuse.flat_storage import identical
from bagua_kernels.optim.fuse.run import Run


class FlatStep:
    """What a step does: `groups` and `state` take the place of the optimizer's own; and the facts that this relies on."""

    def __init__(
        self, params: list[torch.Tensor], ready: list[bool], groups: list[Any], runs: list[Run], state: Any
    ) -> None:
        self._params, self._ready, self.groups, self.runs = params, ready, groups, runs
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        self.state.update({run.tensor: dict(run.kept) for run in runs if run.kept is not None})
        self.state.update({p: state[p] for group in groups for p in group if p in state})
        self.fused = [p for run in runs for p in run.params]
        views = [view for run in runs for view in run.storage.views[run.members]]
        self._places = [pointer for run in runs for pointer in run.storage.pointers[run.members]]
        self._sizes, self._strides = [view.numel() for view in views], [view.stride() for view in views]
        inside = {id(p) for p in self.fused}
        self._others = [p for p in params if id(p) not in inside]
        self._pointers = [p.data_ptr() for p in self._others]
        grads = {id(p): v for run in runs for p, v in zip(run.params, run.storage.grad_views[run.members], strict=True)}
        self._slots = [(i, grads[id(p)]) for i, p in enumerate(params) if id(p) in grads]
        self._note(state)

    def holds(self, params: list[torch.Tensor], ready: list[bool], state: defaultdict[Any, Any]) -> bool:
        """True if nothing that this plan relies on has changed since the last step."""
        return (
            ready == self._ready
            and identical(params, self._params)
            and list(map(torch.Tensor.data_ptr, self.fused)) == self._places
            and list(map(torch.Tensor.numel, self.fused)) == self._sizes
            and list(map(torch.Tensor.stride, self.fused)) == self._strides
            and [p.data_ptr() for p in self._others] == self._pointers
            and identical(entries_of(state), self._entries)
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
            # What lies in a larger memory is part of another object's buffer, such as a bucket, which uses it again.
            if not grads[i]._is_view() and grads[i].untyped_storage().nbytes() == grads[i].nbytes:
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
        self._entries = entries_of(state)
        self._versions = [(run, key, stack._version) for run in self.runs for key, stack in run.stacks.items()]


def entries_of(state: defaultdict[Any, Any]) -> list[Any]:
    """The entries of all states, to find any that was replaced."""
    return list(itertools.chain.from_iterable(s.values() if type(s) is dict else (s,) for s in state.values()))
