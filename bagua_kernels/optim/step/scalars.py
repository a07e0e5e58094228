"""The scalars of a fused step for each tensor: from the options of its group, and from how often it was updated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagua_kernels.launchers.multitensor import AVERAGE, FACTOR, SCALARS, SKIP
from bagua_kernels.optim.step.entry import DRAWS
from bagua_kernels.optim.step.launch import Launch
from bagua_kernels.optim.step.trust import multiplied
from bagua_kernels.optim.step.update import Group
from bagua_kernels.upload import uploaded

MASK = 0xFFFFFFFF


class Counters(dict[str, Any]):
    """Values of counters by name: floats, or float64 tensors with one element a parameter.

    Attributes:
        dtype: as which the state keeps them.
    """

    dtype: torch.dtype


# Moves counters to this step, and returns the rule's scalars by name.
Advance = Callable[[Group, Counters], Mapping[str, Any]]


@dataclass(frozen=True)
class Scalars:
    """What a step is to be taken with.

    Attributes:
        advance: the optimizer's.
        average: decay of the running mean.
        seed: of stochastic rounding.
        grad_scale: what the gradients were multiplied by.
        clipping: what to multiply them by.
        found_inf: True if the step is to be skipped, where the host does not know.
    """

    advance: Advance
    average: float
    seed: int
    grad_scale: Tensor | None = None
    clipping: Tensor | None = None
    found_inf: Tensor | None = None

    def rows(self, launch: Launch) -> tuple[Any, Any, dict[str, Any]]:
        """What a launch needs.

        Returns:
            The kernel's scalars for each tensor; the keys of stochastic rounding; the counters after this step.
        """
        return self._on_device(launch) if launch.on_device else self._on_host(launch)

    def _on_host(self, launch: Launch) -> tuple[Any, Any, dict[str, Any]]:
        rows, scalars = launch.rows, slice(SCALARS, SCALARS + launch.variant.scalars)
        numbers = launch.numbers()
        counted = {name: values.copy() for name, values in numbers.items()}
        rows[:, SKIP] = 0.0 if launch.missing is None else launch.missing
        if AVERAGE in launch.variant.extras:
            rows[:, scalars.stop] = 1.0 - self.average
        for group, begin, end in launch.spans:
            options = as_numbers(group)
            rows[begin:end, FACTOR] = -1.0 if options.get("maximize") else 1.0
            present: Any = slice(begin, end)
            if launch.missing is not None:
                present = begin + np.flatnonzero(~launch.missing[begin:end])
            for members in alike(list(numbers.values()), present):
                counters = Counters({name: float(values[members][0]) for name, values in numbers.items()})
                counters.dtype = launch.precision
                rows[members, scalars] = self._count(launch, options, counters)
                for name, values in counted.items():
                    values[members] = counters[name]
        return self._scaled(rows, launch.table.device), self._keys(launch, numbers.get(DRAWS)), counted

    def _scaled(self, rows: Any, device: torch.device) -> Any:
        """Multiplies the factors of gradients by those of a scaler and of clipping; on a GPU the host does not wait for them."""
        if self.grad_scale is None and self.clipping is None:
            return rows
        factor = 1.0 if self.grad_scale is None else self.grad_scale.double().reciprocal()
        if self.clipping is not None:
            factor = factor * self.clipping.double()
        assert isinstance(factor, Tensor)
        # waits: only if the scaler or the norm is on a GPU and this launch's parameters are on the CPU.
        return multiplied(rows, FACTOR, factor.cpu() if device.type == "cpu" else factor.to(device))

    def _on_device(self, launch: Launch) -> tuple[Any, Any, dict[str, Any]]:
        """The same from counters on a GPU, without waiting for it, and so that a CUDA graph can replay it."""
        device, length = launch.table.device, len(launch.table)

        def column(value: Any, length: int) -> Tensor:
            if isinstance(value, Tensor) and (value.is_cuda or value.device == device):
                # waits: never, since one GPU copies from another without the host.
                return value.to(device, torch.float64).reshape(-1).expand(length)
            return torch.full((length,), float(value), dtype=torch.float64, device=device)

        skip = column(0.0 if self.found_inf is None else self.found_inf, length)
        if launch.missing is not None:
            skip = torch.maximum(skip, uploaded(launch.missing, device).double())
        factor = column(1.0 if self.grad_scale is None else self.grad_scale, length).reciprocal()
        if self.clipping is not None:
            factor = factor * column(self.clipping, length)
        before = {name: values.double() for name, values in launch.counts().items()}
        parts: list[Tensor] = []
        counted: dict[str, list[Tensor]] = {name: [] for name in before}
        for group, begin, end in launch.spans:
            counters = Counters({name: values[begin:end] for name, values in before.items()})
            counters.dtype = launch.precision
            scalars = self._count(launch, group, counters)
            rate = [1.0 - self.average] if AVERAGE in launch.variant.extras else []
            sign = -1.0 if group.get("maximize") else 1.0
            values = [sign * factor[begin:end], skip[begin:end], *scalars, *rate]
            parts.append(torch.stack([column(value, end - begin) for value in values], 1))
            for name, found in counted.items():
                found.append(column(counters[name], end - begin))
        after = {name: torch.where(skip != 0, before[name], torch.cat(found)) for name, found in counted.items()}
        rows = torch.cat(parts).to(torch.float64 if launch.variant.double else torch.float32)
        return rows, self._keys(launch, launch.counters.get(DRAWS)), after

    def _count(self, launch: Launch, options: Group, counters: Counters) -> Sequence[Any]:
        """Advances the counters, and returns the rule's scalars in its order."""
        draws = counters.pop(DRAWS, None)
        scalars = self.advance(options, counters)
        if draws is not None:
            counters[DRAWS] = draws + 1
        if launch.in_order is None:
            launch.in_order = ordering(launch, scalars)
        return launch.in_order(scalars)

    def _keys(self, launch: Launch, draws: Any) -> Any:
        """Seeds of stochastic rounding: of each parameter's number, and of how often it was rounded."""
        if not launch.variant.stochastic:
            return None
        first = ((launch.positions + (self.seed * 0x9E3779B9 & MASK)) & MASK).astype(np.uint32)
        if isinstance(draws, Tensor):
            low = uploaded(first.view(np.int32), draws.device)
            return torch.stack([low, draws.to(torch.int32)], 1)
        return np.stack([first, draws], 1).astype(np.uint32)


def ordering(launch: Launch, scalars: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    """What puts scalars into the order of a launch's rule.

    Raises:
        TypeError: `scalars`, of the first step, have other names than the parameters of the rule.
    """
    names = launch.scalars
    if not isinstance(scalars, Mapping) or set(scalars) != set(names):
        got = sorted(scalars) if isinstance(scalars, Mapping) else scalars
        raise TypeError(
            f"rule {launch.variant.rule.name!r} takes the scalars {', '.join(names)}, got {got}; `_advance` must return a "
            "mapping with these names"
        )
    if len(names) > 1:
        return itemgetter(*names)
    return lambda found: tuple(found[name] for name in names)


def as_numbers(group: Group) -> Group:
    """The options of a group with tensors of one element as numbers."""
    if not any(isinstance(value, (Tensor, tuple)) for value in group.values()):
        return group

    def number(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(number(v) for v in value)
        # waits: only if an option is a tensor on a GPU while steps are counted on the host; `fused=True` counts there.
        return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

    return {name: value if name == "params" else number(value) for name, value in group.items()}


def alike(columns: list[Any], present: Any) -> list[Any]:
    """Which of the parameters that are present have the same counters: what selects each set of them."""
    found = [column[present] for column in columns]
    if all((column == column[0]).all() for column in found if len(column)):
        return [] if isinstance(present, np.ndarray) and not len(present) else [present]
    _, inverse = np.unique(np.stack(found, 1), axis=0, return_inverse=True)
    indices = np.arange(present.start, present.stop) if isinstance(present, slice) else present
    return [indices[inverse.reshape(-1) == k] for k in range(int(inverse.max()) + 1)]
