"""What a process that joins a job begins with: nearly the model of a member, fetched while the others train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagua_kernels.algorithms.wrapping.optimizer_state import tensors_of


class Draft:
    """A model and its optimizer, which `comm.init(join=…, draft=…)` fills with what a member has, before this process joins.

    The member trains on meanwhile, so that what arrives is from several steps. It is near enough for a first gradient. The rest
    follows once this process has joined, a piece after each step, see `Supply`.

    Attributes:
        module: whose trainable parameters and buffers of floating point are filled.
        is_filled: True once they have been.
    """

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Takes a model that is made as the members' is.

        Args:
            module: on the CPU, before an algorithm wraps it.
            optimizer: of its parameters; None if the algorithm gets none either.
        """
        self.module, self.is_filled = module, False
        self._optimizer = optimizer

    def room_for(self, description: Any) -> Sequence[torch.Tensor]:
        """See `comm.membership.draft.Drafting`.

        Raises:
            ValueError: the members have another model.
        """
        tensors = [*_of_module(self.module), *_of_optimizer(self.module, self._optimizer)]
        own = {key: tensor.data for key, tensor in tensors}
        parameters, found = dict(self.module.named_parameters()), list[torch.Tensor]()
        for key, dtype, shape in description:
            tensor = own.get(tuple(key))
            if tensor is None and key[0] == "state" and key[1] in parameters:
                tensor = self._made(parameters[key[1]], key[2], dtype, shape)
            if tensor is None or [str(tensor.dtype), list(tensor.shape)] != [dtype, shape]:
                have = "none of that name" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                raise ValueError(
                    f"the members have {' '.join(key)} as {dtype} of shape {tuple(shape)}, and this process has {have}: make the "
                    "same model and optimizer"
                )
            found.append(tensor)
        return found

    def _made(self, parameter: torch.nn.Parameter, key: str, dtype: str, shape: Sequence[int]) -> torch.Tensor | None:
        """Returns a new tensor of an optimizer's state, which has none before its first step; None without an optimizer."""
        if self._optimizer is None:
            return None
        kind = getattr(torch, dtype.removeprefix("torch."))
        made: torch.Tensor
        if tuple(shape) == tuple(parameter.shape):
            # The strides of a state are those of its parameter.
            made = torch.zeros_like(parameter.data, dtype=kind)
        else:
            made = torch.zeros(tuple(shape), dtype=kind)
        self._optimizer.state[parameter][key] = made
        return made

    def filled(self) -> None:
        """See `comm.membership.draft.Drafting`."""
        self.is_filled = True


def drafted(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[Any, list[torch.Tensor]]:
    """Returns what a draft is filled with, see `comm.membership.draft.Drafted`."""
    found = [*_of_module(module), *_of_optimizer(module, optimizer)]
    description = [[list(key), str(tensor.dtype), list(tensor.shape)] for key, tensor in found]
    return description, [tensor.data for _, tensor in found]


def _of_module(module: torch.nn.Module) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    parameters = [(("parameter", name), p) for name, p in module.named_parameters() if p.requires_grad]
    buffers = [(("buffer", name), each) for name, each in module.named_buffers() if each.is_floating_point()]
    return [*parameters, *buffers]


def _of_optimizer(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    if optimizer is None:
        return []
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [
        (("state", names[parameter], key), tensor)
        for (parameter, key), tensor in tensors_of(optimizer).items()
        if parameter in names
    ]
