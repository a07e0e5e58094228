"""Algorithms in loops of Hugging Face's Accelerate.

>>> from bagua_kernels.integrations.accelerate import prepare
>>> accelerator = Accelerator(gradient_accumulation_steps=2)
>>> model, optimizer = prepare(accelerator, model, optimizer, "bytegrad")
>>> loader = accelerator.prepare(loader)

The rest of the program stays as it is: `accumulate`, `backward`, `clip_grad_norm_`, `autocast`, `save_state`, `load_state`,
`unwrap_model` and `end_training` do what they do with `DistributedDataParallel`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from bagua_kernels.algorithms.algorithm import WrappedModule
from bagua_kernels.integrations.guest import Guest, copied
from bagua_kernels.integrations.libraries import library

_FOLDER = "bagua_kernels"  # in the folder of `save_state`
_DDP = library("accelerate.utils").DistributedDataParallelKwargs


def prepare(
    accelerator: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    spec: str = "bytegrad",
    *,
    hook: bool = False,
    **options: Any,
) -> tuple[torch.nn.Module, Any]:
    """Prepares a model and its optimizer, as `accelerator.prepare` does, with an algorithm in place of DDP; collective.

    1. `accelerator.prepare_model` moves the model and makes its forward passes of mixed precision, without DDP.
    2. The algorithm is put around it.
    3. The optimizer is prepared.
    4. `save_state` keeps what each rank remembers, and the mean model where ranks have parameters of their own. `load_state`
       restores both, bit for bit on as many ranks. `unwrap_model` returns the model, and `end_training` closes the algorithm.

    Args:
        accelerator: an `accelerate.Accelerator`.
        model: not prepared yet.
        optimizer: of its parameters, not prepared yet.
        spec: as for `from_spec`.
        hook: True to keep `DistributedDataParallel`, in which the algorithm's hook averages gradients; see `BaguaKwargs`.
        **options: further arguments of the algorithm.

    Returns:
        The wrapped model and the prepared optimizer.

    Raises:
        ValueError: the model or the optimizer is prepared already, the accelerator shards the model (FSDP, DeepSpeed,
            Megatron-LM), or as for the algorithm.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise ValueError(
            f"expected an accelerator whose ranks have whole models, got one of {kind}: leave out its plugin"
        )
    if getattr(model, "_is_accelerate_prepared", False) or isinstance(
        model, WrappedModule | torch.nn.parallel.DistributedDataParallel
    ):
        raise ValueError(
            f"expected a model that is not prepared, got a {type(model).__name__}: give it to this function alone, which calls "
            "prepare_model"
        )
    if hasattr(optimizer, "accelerator_state"):
        raise ValueError(
            "expected an optimizer that is not prepared: give it to this function alone, which prepares it"
        )
    if hook:
        accelerator.ddp_handler = BaguaKwargs(spec, options, **given_to_ddp(accelerator.ddp_handler))
        prepared, optimizer = accelerator.prepare(model, optimizer)
        return prepared, optimizer
    guest = Guest(spec, **options)
    bare = accelerator.prepare_model(model, evaluation_mode=True)
    wrapped = guest.wrap(bare, [optimizer], accelerator.device, accelerator.scaler)
    # The wrapper stands for the model in `accelerator.prepare` and in `free_memory`.
    wrapped._is_accelerate_prepared = True  # type: ignore[assignment]
    _Session(accelerator, guest, bare).open()
    return wrapped, accelerator.prepare_optimizer(optimizer)


class _Session:
    """The methods of an accelerator that have to know of the algorithm."""

    def __init__(self, accelerator: Any, guest: Guest, model: torch.nn.Module) -> None:
        self._accelerator, self._guest, self._model = accelerator, guest, model
        self._folder: Path | None = None
        self._unwrap: Callable[..., Any] = accelerator.unwrap_model
        self._end: Callable[..., Any] = accelerator.end_training

    def open(self) -> None:
        accelerator = self._accelerator
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._find)
        # It is loaded last, after the model and the optimizer.
        accelerator.register_for_checkpointing(self)
        accelerator.unwrap_model = self._unwrapped
        accelerator.end_training = self._ended

    def _save(self, models: Sequence[torch.nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        """Writes beside the accelerator's own files; called by all ranks before these are written."""
        guest = self._guest
        if guest.exchanges_parameters:
            with guest.averaged():
                for at, model in enumerate(models):
                    if model is self._model and at < len(weights):
                        weights[at] = copied(weights[at])
        guest.save(Path(folder) / _FOLDER)

    def _find(self, models: Sequence[torch.nn.Module], folder: str) -> None:
        self._folder = Path(folder) / _FOLDER

    def state_dict(self) -> dict[str, Any]:
        """What Accelerate saves of this, on one rank: nothing that a rank remembers."""
        return {"folder": _FOLDER}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what each rank remembers; called by all ranks."""
        assert self._folder is not None
        self._guest.load(self._folder)

    def _unwrapped(self, model: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        return self._unwrap(model.module if isinstance(model, WrappedModule) else model, *arguments, **named)

    def _ended(self) -> None:
        self._guest.synchronize()
        self._guest.close()
        accelerator = self._accelerator
        accelerator.unwrap_model, accelerator.end_training = self._unwrap, self._end
        accelerator._custom_objects = [one for one in accelerator._custom_objects if one is not self]
        self._end()


@contextmanager
def averaged(model: torch.nn.Module) -> Iterator[None]:
    """The wrapped model has the mean parameters of all ranks within the block, for evaluation; collective."""
    if not isinstance(model, WrappedModule):
        raise TypeError(f"expected the model that prepare returned, got a {type(model).__name__}")
    with model.averaged():
        yield


class BaguaKwargs(_DDP):  # type: ignore[misc, valid-type]
    """Has Accelerate's `DistributedDataParallel` average gradients by an algorithm.

    >>> accelerator = Accelerator()
    >>> accelerator.ddp_handler = BaguaKwargs("bytegrad")
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    `save_state` and `load_state` keep what each rank remembers. Accelerate finds a handler in `kwargs_handlers=[...]` by its
    class, and knows no subclass: set the attribute instead.

    Args:
        spec: of an algorithm that averages gradients, or of a codec; as for `ddp.hook`.
        options: further arguments of the algorithm.
        **ddp: arguments of `DistributedDataParallelKwargs`, such as `bucket_cap_mb`.

    Attributes:
        guest: the hook's.
    """

    def __init__(self, spec: str = "bytegrad", options: dict[str, Any] | None = None, **ddp: Any) -> None:
        super().__init__(**ddp)
        if getattr(self.comm_hook, "value", self.comm_hook) != "no":
            raise ValueError(
                f"DistributedDataParallel has one hook, got comm_hook={self.comm_hook} beside {spec!r}: leave it out"
            )
        self.guest = Guest(spec, hook=True, **(options or {}))

    def to_dict(self, *_: Any) -> dict[str, Any]:
        """Returns what DDP is given: its own arguments alone."""
        return given_to_ddp(self)

    def register_comm_hook(self, model: torch.nn.Module) -> None:
        """Called by an accelerator with the `DistributedDataParallel` that it has made."""
        self.guest.register(model)
        accelerator = sys._getframe(1).f_locals.get("self")
        if hasattr(accelerator, "register_save_state_pre_hook"):
            _Session(accelerator, self.guest, model).open()


def given_to_ddp(handler: Any) -> dict[str, Any]:
    """Returns the arguments of DDP in a handler; none if there is no handler."""
    hooks = ("comm_hook", "comm_wrapper", "comm_state_option")
    names = [each.name for each in fields(_DDP)] if handler is not None else []
    return {name: getattr(handler, name) for name in names if name not in hooks}
