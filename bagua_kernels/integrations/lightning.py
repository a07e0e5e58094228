"""Algorithms as a strategy of Lightning's Trainer, for both of its packages, `lightning` and `pytorch_lightning`.

>>> from bagua_kernels.integrations.lightning import BaguaStrategy
>>> trainer = Trainer(devices=2, strategy=BaguaStrategy("bytegrad:block=256"))

Once this module is imported, `Trainer(strategy="bagua")` is the same with "bytegrad".
"""

from __future__ import annotations

import importlib.util
import inspect
import shutil
import sys
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bagua_kernels.integrations.guest import DDP_ARGUMENTS, Guest, beside, copied, taken_by_ddp
from bagua_kernels.integrations.libraries import library

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def BaguaStrategy(algorithm: str = "bytegrad", *, hook: bool = False, package: str = "", **options: Any) -> Any:
    """Makes a strategy for a Trainer, whose ranks train with an algorithm in place of DDP.

    1. Ranks are started and joined as with `strategy="ddp"`: by Lightning, torchrun or Slurm.
    2. Training begins: the algorithm is put around the LightningModule, and gets its optimizer. `validate`, `test` and
       `predict` alone have no algorithm.
    3. Validation within training sees the mean parameters of all ranks. So do checkpoints, whose names are the module's own.
    4. Beside each checkpoint lies a folder with what each rank remembers, `FILE.ranks`. A resumed fit goes on bit for bit on as
       many ranks; on others residuals are shared out.
    5. Training ends: parameters become equal on all ranks, and the algorithm is closed, also after an exception.

    Gradient clipping sees averaged gradients; with algorithms on parameters it sees this rank's own, as their local steps do.

    Args:
        algorithm: as for `from_spec`, such as "diloco:interval=30".
        hook: True to keep DDP, in which the algorithm's hook averages gradients.
        package: "lightning" or "pytorch_lightning"; by default the one that is imported, or `lightning` of both.
        **options: of Lightning's `DDPStrategy`, such as `timeout` or `start_method`; all others of the algorithm.

    Returns:
        An instance of that package's `DDPStrategy`.

    Raises:
        ImportError: neither package is installed.
        ValueError: the algorithm makes its own optimizer, or has no hook.
    """
    return strategy_class(package or _package())(algorithm, hook=hook, **options)


@cache
def strategy_class(package: str) -> Any:
    """Returns the strategy's class, for one of the packages: each has classes of its own.

    Args:
        package: "lightning" or "pytorch_lightning".

    Raises:
        ValueError: it is neither.
        ImportError: it is not installed.
    """
    if package not in PACKAGES:
        raise ValueError(f"expected one of {', '.join(PACKAGES)}, got {package!r}")
    found = library(f"{PACKAGES[package]}.strategies")
    fitting = library(f"{PACKAGES[package]}.trainer.states").TrainerFn.FITTING
    averaging: Any = getattr(library(f"{PACKAGES[package]}.callbacks"), "WeightAveraging", ())
    of_ddp = frozenset(inspect.signature(found.DDPStrategy.__init__).parameters) - {"self", "kwargs"}

    class BaguaStrategy(found.DDPStrategy):  # type: ignore[misc, name-defined]
        """See the function of this name."""

        strategy_name = "bagua"

        def __init__(self, algorithm: str = "bytegrad", *, hook: bool = False, **options: Any) -> None:
            given = taken_by_ddp(options, of_ddp, hook)
            for name in DDP_ARGUMENTS:
                options.pop(name, None)
            if given.get("ddp_comm_hook") is not None:
                raise ValueError("ddp_comm_hook is one hook too many: leave it out, or take DDPStrategy")
            super().__init__(**given)
            self.guest = Guest(algorithm, hook=hook, **options)
            self._resumed: Path | None = None
            self._failure: BaseException | None = None

        def _setup_model(self, model: torch.nn.Module) -> Any:
            # Without a hook the algorithm comes last, when there is an optimizer and nothing moves parameters any more.
            return super()._setup_model(model) if self.guest.hooks else model

        def _register_ddp_hooks(self) -> None:
            if self.guest.hooks:
                self.guest.register(self.model)

        def setup(self, trainer: Any) -> None:
            """Prepares the model as Lightning does, and puts the algorithm around it for training."""
            self._failure = None
            averages = [one for one in trainer.callbacks if isinstance(one, averaging)]
            if averages and self.guest.exchanges_parameters:
                raise ValueError(
                    f"{type(averages[0]).__name__} averages parameters that each rank has of its own, and a checkpoint has only "
                    f"those of rank 0: leave it out with {self.guest.spec!r}"
                )
            super().setup(trainer)
            if trainer.state.fn != fitting or self.guest.hooks:
                return
            if self.guest.applies_in_backward and trainer.gradient_clip_val:
                raise ValueError(
                    "with apply_in_backward parameters are updated before all gradients are known: leave it out, or "
                    "gradient_clip_val"
                )
            scaler = getattr(self.precision_plugin, "scaler", None)
            self.model = self.guest.wrap(self.lightning_module, self.optimizers, self.root_device, scaler)

        def on_validation_start(self) -> None:
            """Gives validation within training the mean model, and the buffers with which DDP would evaluate."""
            self.guest.share_buffers()
            self.guest.begin_averaged()

        def on_validation_end(self) -> None:
            """Goes on with this rank's own."""
            self.guest.end_averaged()

        def on_train_end(self) -> None:
            """Makes parameters equal on all ranks."""
            self.guest.synchronize()

        def lightning_module_state_dict(self) -> dict[str, Any]:
            """Returns the mean model's state, by the module's own names; called by all ranks."""
            if not self.guest.exchanges_parameters or not self.guest.acts:
                return dict(super().lightning_module_state_dict())
            with self.guest.averaged():
                return copied(super().lightning_module_state_dict())

        def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            """Writes a checkpoint on rank 0, and what each rank remembers beside it."""
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            if self.guest.acts:
                self.guest.save(beside(filepath))

        def remove_checkpoint(self, filepath: Any) -> None:
            """Removes both."""
            super().remove_checkpoint(filepath)
            if self.is_global_zero:
                shutil.rmtree(beside(filepath), ignore_errors=True)

        def load_checkpoint(self, checkpoint_path: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
            """Reads a checkpoint, and notes where the rest lies."""
            # A link, such as last.ckpt, has its folder beside the file to which it leads.
            self._resumed = beside(
                Path(checkpoint_path).resolve() if Path(checkpoint_path).exists() else checkpoint_path
            )
            found: dict[str, Any] = super().load_checkpoint(checkpoint_path, *arguments, **named)
            return found

        def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
            """Restores the optimizer's state, and last what each rank remembers."""
            super().load_optimizer_state_dict(checkpoint)
            folder, self._resumed = self._resumed, None
            if folder is None or not self.guest.acts:
                return
            # All ranks do the same, also where only some see the folder.
            if self.broadcast(folder.is_dir()):
                self.guest.load(folder)
            elif self.is_global_zero:
                warnings.warn(
                    f"there is no {folder}: residuals, and parameters that ranks had of their own, begin anew",
                    RuntimeWarning,
                    stacklevel=2,
                )

        def on_exception(self, exception: BaseException) -> None:
            """Notes that other ranks may not come to the end."""
            self._failure = exception
            super().on_exception(exception)

        def teardown(self) -> None:
            """Ends the algorithm; the module goes on by itself."""
            if self.guest.acts and not self.guest.hooks:
                self.model = self.lightning_module
            self.guest.close(self._failure)
            super().teardown()

    BaguaStrategy.__module__ = __name__
    return BaguaStrategy


def _package() -> str:
    """Returns the package whose Trainer is meant: one that is imported, else one that is installed."""
    imported = [name for name in PACKAGES if PACKAGES[name] in sys.modules]
    installed = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
    return next(iter([*imported, *installed, *PACKAGES]))


def _register() -> None:
    """Makes the strategy known by its name, in each package that is imported; in all that are installed if none is."""
    imported = [name for name in PACKAGES if PACKAGES[name] in sys.modules]
    for name in imported or [each for each in PACKAGES if importlib.util.find_spec(each) is not None]:
        registry = library(f"{PACKAGES[name]}.strategies").StrategyRegistry
        registry.register("bagua", strategy_class(name), description="an algorithm of bagua_kernels", override=True)


if not any(importlib.util.find_spec(name) for name in PACKAGES):
    library("lightning")  # raises
_register()
