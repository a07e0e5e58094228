"""Algorithms as a strategy of Lightning's Fabric.

>>> from bagua_kernels.integrations.fabric import BaguaStrategy
>>> fabric = Fabric(devices=2, strategy=BaguaStrategy("bytegrad"))
>>> fabric.launch()
>>> model, optimizer = fabric.setup(model, optimizer)

Once this module is imported, `Fabric(strategy="bagua")` is the same. At the end of training call `fabric.strategy.close()`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.integrations.guest import Guest, beside, copied, taken_by_ddp
from bagua_kernels.integrations.libraries import library

_FABRIC = library("lightning.fabric.strategies")
_CONTROL = library("lightning.fabric.strategies.strategy")._BackwardSyncControl
_OF_DDP = frozenset(inspect.signature(_FABRIC.DDPStrategy.__init__).parameters) - {"self", "kwargs"}


class _SyncControl(_CONTROL):  # type: ignore[misc, valid-type]
    """What `fabric.no_backward_sync` asks."""

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Returns a block in which gradients accumulate locally, if enabled."""
        no_sync: Any = module.no_sync if enabled else contextlib.nullcontext
        found: AbstractContextManager[None] = no_sync()
        return found


class BaguaStrategy(_FABRIC.DDPStrategy):  # type: ignore[misc, name-defined]
    """Puts an algorithm around the module of `fabric.setup`, in place of DDP.

    `no_backward_sync`, `clip_gradients`, `save` and `load` do what they do with DDP. `save` also writes what each rank remembers
    into a folder beside the file, `FILE.ranks`, which `load` reads. One module at a time has an algorithm.

    Args:
        algorithm: as for `from_spec`.
        hook: True to keep DDP, in which the algorithm's hook averages gradients.
        **options: of Lightning's `DDPStrategy`, such as `timeout`; all others of the algorithm.

    Attributes:
        guest: the algorithm from its beginning to its end.

    Raises:
        ValueError: the algorithm makes its own optimizer, or has no hook.
    """

    def __init__(self, algorithm: str = "bytegrad", *, hook: bool = False, **options: Any) -> None:
        super().__init__(**taken_by_ddp(options, _OF_DDP, hook))
        self.guest = Guest(algorithm, hook=hook, **options)
        self._backward_sync_control = _SyncControl()

    def setup_module(self, module: torch.nn.Module) -> Any:
        """Wraps a module that has no optimizer here."""
        return self._wrap(module, [])

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[Any, Sequence[torch.optim.Optimizer], Any]:
        """Wraps a module with its optimizers."""
        return self._wrap(module, optimizers), optimizers, scheduler

    def _wrap(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Any:
        if self.guest.acts:
            raise ValueError(
                "this strategy has wrapped a module already: call fabric.strategy.close() before the next, or give further "
                "modules to another Fabric"
            )
        if self.guest.hooks:
            wrapped = super().setup_module(module)
            self.guest.register(wrapped)
            return wrapped
        return self.guest.wrap(module, optimizers, self.root_device, getattr(self.precision, "scaler", None))

    def averaged(self) -> AbstractContextManager[None]:
        """Returns a block in which the module has the mean parameters of all ranks, for evaluation; collective."""
        return self.guest.averaged()

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """Returns the state of a module, by its own names; the mean model's, within `save`."""
        found: dict[str, Any] = super().get_module_state_dict(
            module.module if isinstance(module, Algorithm) else module
        )
        if isinstance(module, Algorithm) and self.guest.exchanges_parameters:
            return copied(found)
        return found

    def load_module_state_dict(self, module: torch.nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Restores the state of a module by its own names."""
        inner = module.module if isinstance(module, Algorithm) else module
        super().load_module_state_dict(inner, state_dict, strict=strict)

    def save_checkpoint(self, path: Any, state: dict[str, Any], *arguments: Any, **named: Any) -> None:
        """Writes a checkpoint on rank 0, and what each rank remembers beside it."""
        with self.guest.averaged():
            super().save_checkpoint(path, state, *arguments, **named)
        self.guest.save(beside(path))

    def load_checkpoint(self, path: Any, state: Any = None, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Reads a checkpoint, and last what each rank remembers."""
        found: dict[str, Any] = super().load_checkpoint(path, state, *arguments, **named)
        folder = beside(Path(path).resolve())
        if self.guest.acts and self.broadcast(folder.is_dir()):
            self.guest.load(folder)
        return found

    def synchronize(self) -> None:
        """Makes parameters equal on all ranks; collective where they differ."""
        self.guest.synchronize()

    def close(self) -> None:
        """Makes parameters equal on all ranks, and ends the algorithm; collective. The module goes on by itself."""
        self.guest.synchronize()
        self.guest.close()


_FABRIC.STRATEGY_REGISTRY.register("bagua", BaguaStrategy, description="an algorithm of bagua_kernels", override=True)
