"""Parameters that are waited for where they are used, since updates of the last backward pass may still be under way."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Sequence, ValuesView
from typing import Any, Protocol

import torch
from torch import nn

from bagua_kernels.algorithms.engine.member import Member


class Updates(Protocol):
    """What may still be under way."""

    def arrive(self, positions: Sequence[int]) -> None:
        """Waits for the updates of some parameters."""

    def complete(self) -> None:
        """Waits for all of them."""


class Gates:
    """Makes whoever reads a parameter of a module wait until its update is through.

    A module reads its parameters as its attributes, or by `parameters()` and the like; both go by way of its table of
    parameters, in whose place one is put that waits. For modules that keep references of their own, all of their parameters
    are waited for before their forward pass. References kept anywhere else are not seen.

    Attributes:
        pending: the updates that are under way; None if there are none.
    """

    def __init__(self) -> None:
        """Waits for nothing yet."""
        self.pending: Updates | None = None
        self._positions: dict[int, int] = {}
        # Kept, so that no other tensor gets the `id` of one of them.
        self._parameters: list[nn.Parameter] = []
        self._replaced: list[tuple[nn.Module, dict[str, Any]]] = []
        self._handles: list[Any] = []

    def install(self, module: nn.Module, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Watches over parameters.

        Args:
            module: which has them, or whose submodules do.
            optimizer: whose states are updated too; they are waited for where they are saved or loaded.
            parameters: positions count in this list.
        """
        self._parameters = list(parameters)
        self._positions = {id(p): position for position, p in enumerate(parameters)}
        for each in module.modules():
            if any(id(p) in self._positions for p in each._parameters.values()):
                self._replaced.append((each, each._parameters))
                each._parameters = _Waiting(each._parameters, self)
                self._handles.append(each.register_forward_pre_hook(self.before_forward))
        self._handles += [
            optimizer.register_state_dict_pre_hook(self.complete),
            optimizer.register_load_state_dict_pre_hook(self.complete),
            optimizer.register_step_pre_hook(self.before_step),
        ]

    def remove(self) -> None:
        """Waits for nothing from now on."""
        self.pending = None
        for each, before in self._replaced:
            now = each._parameters
            if isinstance(now, _Waiting) and now.gates is self:
                # What was there before may be another algorithm's, which may have ended by now.
                ended = isinstance(before, _Waiting) and not before.gates._handles
                kept = {} if ended else before
                kept.clear()
                kept.update(now)
                each._parameters = kept
        for handle in self._handles:
            handle.remove()
        self._replaced, self._handles = [], []

    def wait(self, parameters: Iterable[torch.Tensor | None]) -> None:
        """Waits for the updates of these parameters, as far as they are watched over."""
        pending = self.pending
        if pending is not None:
            found = (self._positions.get(id(p)) for p in parameters)
            pending.arrive([position for position in found if position is not None])

    @torch._disable_dynamo  # type: ignore[attr-defined]  # waiting cannot be traced
    def before_forward(self, module: nn.Module, _: Any) -> None:
        """Waits for a module's own parameters."""
        if self.pending is not None:
            # It reads its projection's weight without calling it, and in a compiled module nothing else waits.
            inside = module.modules() if isinstance(module, nn.MultiheadAttention) else (module,)
            for each in inside:
                self.wait(each._parameters.values())

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Waits for all, if the optimizer has anything to do."""
        if self.pending is not None and any(p.grad is not None for g in optimizer.param_groups for p in g["params"]):
            self.pending.complete()

    def complete(self, *_: Any) -> None:
        """Waits for all."""
        if self.pending is not None:
            self.pending.complete()

    def __reduce__(self) -> tuple[Any, ...]:
        """A module's copies have hooks that wait for nothing: their parameters are their own."""
        return Gates, ()


class _Waiting(dict[str, "nn.Parameter | None"]):
    """A module's parameters, each of which is waited for when it is read."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], gates: Gates) -> None:
        super().__init__(parameters)
        self.gates = gates

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        self.gates.wait((parameter,))
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        self.gates.wait((super().get(name),))
        return super().get(name, default)

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
        """As of a dict."""
        self.gates.wait(super().values())
        return super().values()

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        """As of a dict."""
        self.gates.wait(super().values())
        return super().items()

    def copy(self) -> dict[str, nn.Parameter | None]:
        """A plain one."""
        return dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.copy(),)


def check_waits(members: Iterable[Member], optimizer: torch.optim.Optimizer | None, applies: bool) -> None:
    """Raises unless all gradients are used up in backward, so that nobody has to wait for any of them.

    Raises:
        ValueError: steps are not taken in backward, a gradient is sparse, or the optimizer lacks a parameter.
    """
    if not applies or optimizer is None:
        raise ValueError("wait_in_forward=True is for steps that are taken in backward: set apply_in_backward=True too")
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for member in members:
        if member.sparse:
            raise ValueError(
                f"wait_in_forward=True leaves no gradient to the optimizer, but that of {member.name!r} is sparse: make the "
                "embedding with sparse=False"
            )
        if id(member.parameter) not in known:
            raise ValueError(
                f"wait_in_forward=True needs an optimizer of all trainable parameters, but it lacks {member.name!r}: freeze it"
            )
