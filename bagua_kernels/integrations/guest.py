"""An algorithm, or a hook of `DistributedDataParallel`, in the training loop of another library."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bagua_kernels import comm
from bagua_kernels.algorithms import checkpoint, ddp
from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce
from bagua_kernels.algorithms.algorithm import Algorithm
from bagua_kernels.algorithms.models.model_algorithm import ModelAlgorithm
from bagua_kernels.algorithms.wrapping.recorded import arguments_of

# Of `DistributedDataParallel`, in which a hook is. They mean nothing to an algorithm, which finds unused parameters by itself.
DDP_ARGUMENTS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb")
_BESIDE = ".ranks"


def taken_by_ddp(options: dict[str, Any], names: Collection[str], hook: bool) -> dict[str, Any]:
    """Takes the arguments of a library's strategy for DDP out of others, which are the algorithm's, and returns them.

    Args:
        options: all arguments.
        names: that the strategy has itself.
        hook: True if DDP stays, which then gets its own arguments, too.
    """
    taken = {*names, *(DDP_ARGUMENTS if hook else ())}
    return {name: options.pop(name) for name in list(options) if name in taken}


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state of the same type with copies of its tensors. Those that are one, as tied weights are, stay one."""
    found = copy.copy(state)
    copies: dict[Any, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            # Empty ones all seem to lie in one place.
            place = value.data_ptr() or name, value.device, value.dtype, value.shape, value.stride()
            if place not in copies:
                copies[place] = value.clone()
            found[name] = copies[place]
    return found


def beside(path: Any) -> Path:
    """Returns the folder beside a checkpoint's file in which each rank has a file: `FILE.ranks`."""
    found = Path(path)
    return found.with_name(found.name + _BESIDE)


class Guest:
    """One algorithm from the beginning of training to its end; made before there is a model.

    1. `wrap` or `register` joins the other ranks, and puts the algorithm around a model, or its hook into DDP.
    2. Training runs by itself. Around evaluation, `averaged` gives the model the means over ranks.
    3. `save` and `load` keep what each rank remembers, beside the library's own checkpoint.
    4. `close` ends it, also after an exception. It undoes `comm.init` if this called it.

    Args:
        spec: as for `from_spec`, such as "bytegrad:block=256".
        hook: True for a hook of `DistributedDataParallel`, which the library then wraps around the model as without this.
        **options: further arguments of the algorithm.

    Attributes:
        spec: as given.
        hooks: as `hook`.
        algorithm: what is around the model; None before, and with a hook.
        hook: the hook; None before, and without one.
        exchanges_parameters: True if ranks have parameters of their own between exchanges.
        applies_in_backward: True if backward updates parameters, before all gradients are known.

    Raises:
        ValueError: the spec names nothing, or its algorithm cannot be used in a loop of another library.
    """

    def __init__(self, spec: str, *, hook: bool = False, **options: Any) -> None:
        kind, parsed = Algorithm.named(spec)
        if issubclass(kind, MomentumAllReduce):
            raise ValueError(
                f"{spec!r} makes its own optimizer, but the library has made one already: write a loop of your own for it, or "
                "take an algorithm that averages gradients"
            )
        if hook:
            # What does not fit is refused before training.
            ddp.hook(spec, **options)
        self.spec, self.hooks, self._options = spec, hook, options
        self.algorithm: Algorithm | None = None
        self.hook: ddp.Hook | None = None
        self.exchanges_parameters = issubclass(kind, ModelAlgorithm)
        self.applies_in_backward = bool({**parsed, **options}.get("apply_in_backward"))
        self._takes_scaler = "scaler" in arguments_of(kind)
        self._made_world = False
        self._resume = ""
        self._averaging: contextlib.ExitStack | None = None

    def wrap(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Algorithm:
        """Puts the algorithm around a model; collective.

        Args:
            model: on its device, and with the types of its parameters, for good.
            optimizers: all of its optimizers.
            device: where it is.
            scaler: that by which losses are scaled, if any.

        Raises:
            ValueError: an algorithm on parameters gets several optimizers or none, or as for the algorithm.
        """
        if len(optimizers) != 1 and self.exchanges_parameters:
            raise ValueError(
                f"{self.spec!r} acts before and after the steps of one optimizer, got {len(optimizers)}: give all parameters to "
                "one optimizer, or take an algorithm that averages gradients"
            )
        self._join(device)
        given: dict[str, Any] = {}
        if scaler is not None and self._takes_scaler:
            given["scaler"] = scaler
        optimizer = optimizers[0] if len(optimizers) == 1 else None
        try:
            self.algorithm = Algorithm.from_spec(self.spec, model, optimizer, **given, **self._options)
        except BaseException as error:
            self.close(error)
            raise
        return self.algorithm

    def register(self, model: torch.nn.Module) -> None:
        """Registers the hook with a `DistributedDataParallel`; collective if nobody has called `comm.init`."""
        first = next(model.parameters(), None)
        self._join(torch.device("cpu") if first is None else first.device)
        self.hook = ddp.hook(self.spec, model, **self._options)
        model.register_comm_hook(None, self.hook)  # type: ignore[operator]

    def _join(self, device: torch.device) -> None:
        if not comm.is_initialized():
            # An index means nothing on a CPU, where libraries may have one all the same.
            comm.init(device=torch.device("cpu") if device.type == "cpu" else device)
            self._made_world = True

    @property
    def acts(self) -> bool:
        """Returns True from its beginning to its end."""
        return self.algorithm is not None or self.hook is not None

    def share_buffers(self) -> None:
        """Gives all ranks rank 0's buffers, or their means, as a forward pass in training does; collective."""
        if self.algorithm is not None:
            self.algorithm._synchronize_buffers()

    def begin_averaged(self) -> None:
        """Gives the model the mean parameters of all ranks, until `end_averaged`; collective where they differ."""
        if self.exchanges_parameters and self.algorithm is not None and self._averaging is None:
            self._averaging = contextlib.ExitStack()
            self._averaging.enter_context(self.algorithm.averaged())

    def end_averaged(self) -> None:
        """Gives the model this rank's own parameters again."""
        averaging, self._averaging = self._averaging, None
        if averaging is not None:
            averaging.close()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The model has the mean parameters of all ranks within the block; collective where they differ. It may be nested."""
        outermost = self._averaging is None
        self.begin_averaged()
        try:
            yield
        finally:
            if outermost:
                self.end_averaged()

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """The model has this rank's own parameters within the block, be it within `averaged`; then collective at its end."""
        was = self._averaging is not None
        self.end_averaged()
        try:
            yield
        finally:
            if was:
                self.begin_averaged()

    def save(self, folder: Path) -> None:
        """Writes what each rank remembers, see `algorithms.checkpoint.save`; collective. Nothing before its beginning."""
        found = self.algorithm or self.hook
        if found is not None:
            with self.own():
                checkpoint.save(found, folder)

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote; collective.

        Raises:
            ValueError: it is the state of something else, or ranks see different folders.
        """
        found = self.algorithm or self.hook
        if found is not None:
            checkpoint.load(found, folder)

    def synchronize(self) -> None:
        """Makes parameters equal on all ranks; collective where they differ."""
        self.end_averaged()
        if self.algorithm is not None:
            self.algorithm.synchronize()

    def close(self, error: BaseException | None = None) -> None:
        """Ends it; collective without an error. Calling it again does nothing.

        Args:
            error: why training has ended early, if it has: other ranks may not come to its end.
        """
        algorithm, hook, made = self.algorithm, self.hook, self._made_world
        self.algorithm = self.hook = None
        self._made_world = False
        if error is None:
            self.end_averaged()
            for one in (algorithm, hook):
                if one is not None:
                    one.close()
        else:
            self._averaging = None
            if algorithm is not None:
                algorithm.__exit__(type(error), error, None)
            if hook is not None:
                hook.abort(f"training ended early: {type(error).__name__}: {error}")
        if made and comm.is_initialized():
            if error is not None:
                comm.world().abort(f"training ended early: {type(error).__name__}: {error}")
            comm.shutdown()
