"""A state without its tensors: what is sent as an object where the tensors are sent by themselves."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from bagua_kernels.bucket import dense_strides


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor in a state.

    Attributes:
        index: of the tensor.
    """

    index: int


@dataclass
class Structure:
    """Dictionaries, lists, tuples and values of a state, with a place for each tensor; its pickle has no elements of tensors.

    A tensor that stands in two places is one, here and in what `filled` returns. Sparse tensors and those of subclasses stay
    values.

    Attributes:
        state: with places.
        forms: shape, strides, dtype and type of device of each tensor.
        tensors: of this process's state; empty after unpickling.
    """

    state: Any = None
    forms: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, str]] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, state: Any, device: torch.device) -> Self:
        """Takes the tensors out of a state, which stays as it is.

        Args:
            state: dictionaries, lists and tuples, of anything.
            device: tensors on it and on the CPU are taken out; others stay values.
        """
        found = cls()
        found.state = found._without(state, {"cpu", device.type}, {})
        return found

    def _without(self, value: Any, devices: set[str], places: dict[torch.Tensor, _Place]) -> Any:
        if isinstance(value, torch.Tensor):
            if type(value) is not torch.Tensor or value.layout != torch.strided or value.device.type not in devices:
                return value
            if value not in places:
                places[value] = _Place(len(self.tensors))
                self.tensors.append(value.detach())
                self.forms.append((tuple(value.shape), dense_strides(value), value.dtype, value.device.type))
            return places[value]
        if isinstance(value, dict):
            # A copy is of the same class.
            result = copy.copy(value)
            for key, each in value.items():
                result[key] = self._without(each, devices, places)
            return result
        if type(value) in (list, tuple):
            return type(value)(self._without(each, devices, places) for each in value)
        return value

    def room(self, device: torch.device) -> list[torch.Tensor]:
        """Returns memory for the tensors, on the CPU or on a device of this process.

        Args:
            device: of those that were not on the CPU.
        """
        return [
            torch.empty_strided(shape, strides, dtype=dtype, device=device if kind == device.type else kind)
            for shape, strides, dtype, kind in self.forms
        ]

    def filled(self, tensors: list[torch.Tensor]) -> Any:
        """Returns the state with tensors in their places."""
        return _filled(self.state, tensors)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tensors": []}


def _filled(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.index]
    if isinstance(value, dict):
        for key, each in value.items():
            value[key] = _filled(each, tensors)
        return value
    if type(value) in (list, tuple):
        return type(value)(_filled(each, tensors) for each in value)
    return value
