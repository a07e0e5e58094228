"""A step on some of an optimizer's parameters, while the others' gradients are still being computed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bagua_kernels.compression.block import BlockCodec
from bagua_kernels.launchers.multitensor import TensorUpdate
from bagua_kernels.optim.step.compressed import PayloadStep
from bagua_kernels.optim.step.extras import Extras
from bagua_kernels.optim.step.fused import Fused
from bagua_kernels.optim.step.launch import Launch
from bagua_kernels.optim.step.launches import Launches
from bagua_kernels.optim.step.strides import is_dense
from bagua_kernels.optim.step.update import CannotFuseError

# An optimizer notes what it makes for a step, of whichever parameters.
_planning = threading.Lock()


class Part:
    """Takes steps of some parameters of an optimizer, with the results that `optimizer.step()` has for them.

    Neither reads nor writes anything of other parameters, so backward may go on meanwhile. Hooks of the optimizer do not run.
    """

    def __init__(self, optimizer: Fused, params: Sequence[Tensor]) -> None:
        """Prepares steps.

        Args:
            optimizer: one of this package.
            params: some of its parameters; those of them that have a gradient are updated.
        """
        self._optimizer = optimizer
        self._params = list(params)
        self._launches: Launches | None = None
        self._made: list[tuple[Tensor, str]] = []

    @torch.no_grad()
    def step(self) -> None:
        """Takes a step from the parameters' `grad`.

        Raises:
            RuntimeError: only PyTorch's own step could update them, and that takes all parameters at a time.
        """
        with self._current() as launches:
            # Before the first write: backward must not use a parameter unnoticed that is half updated. It may go on with those
            # that have no gradient, which a forward pass under way may have used.
            torch.autograd.graph.increment_version(launches.updated())
            self._optimizer._run(launches, None, None)

    @contextmanager
    def from_payloads(self, codec: BlockCodec) -> Iterator[PayloadStep | None]:
        """Takes a step from gradients that are still encoded, as they arrive; `grad` is not read, but must not be None.

        Gives None, and takes no step, if that would need more of the gradients than payloads have, or differ from `step`.

        Raises:
            RuntimeError: as for `step`.
        """
        with self._prepared() as prepared:
            yield None if prepared is None else PayloadStep(codec, list(prepared), list(prepared.values()))

    @contextmanager
    def from_factors(self) -> Iterator[list[TensorUpdate] | None]:
        """Takes a step from gradients that are products of thin factors; `grad` is not read, but must not be None.

        Gives what `LowRank.finish_with_updates` needs of each parameter; or None, and takes no step, as `from_payloads`, or if
        a parameter is not contiguous.

        Raises:
            RuntimeError: as for `step`.
        """
        if not all(p.is_contiguous() and p.device.type == "cpu" for p in self._params):
            yield None
            return
        with self._prepared() as prepared:
            if prepared is None:
                yield None
                return
            found = {}
            for launch, rows in prepared.items():
                launch.begin()
                for index, parameter in enumerate(launch.params):
                    found[id(parameter)] = TensorUpdate(launch.variant, launch.table, rows, index)
            yield [found[id(p)] for p in self._params]

    @contextmanager
    def _prepared(self) -> Iterator[dict[Launch, Any] | None]:
        """The launches with their scalars, whose steps are counted when it ends; None where `step` is to be taken."""
        if not self._readable():
            yield None
            return
        with self._current() as launches:
            if any(launch.on_device or launch.staged for launch in launches.each):
                self._forget_launches()
                yield None
                return
            torch.autograd.graph.increment_version(launches.updated())  # as in `step`
            prepared = {launch: self._optimizer._scalars().rows(launch) for launch in launches.each}
            yield {launch: rows for launch, (rows, _, _) in prepared.items()}
            for launch, (_, _, counted) in prepared.items():
                launch.count(counted)

    def _readable(self) -> bool:
        elementwise = type(self._optimizer)._launch is Fused._launch and self._optimizer._extras == Extras()
        # A decoded gradient has the parameter's dtype, so that of other ones rounding would differ.
        return elementwise and all(p.dtype == torch.float32 and is_dense(p) for p in self._params)

    def _forget_launches(self) -> None:
        """Removes the states that were made for a step which is not taken, so that the next ones are the first."""
        with _planning:
            self._launches, self._optimizer._made = None, self._made
            self._optimizer._unmake()
            self._made = []

    @contextmanager
    def _current(self) -> Iterator[Launches]:
        with _planning:
            if self._launches is None or not self._launches.matches(self._optimizer):
                self._launches = None
                self._launches = self._made_anew()
                self._made, self._optimizer._made = self._optimizer._made, []
            else:
                self._made = []
        launches = self._launches
        try:
            yield launches
        finally:
            launches.end()

    def _made_anew(self) -> Launches:
        optimizer = self._optimizer
        optimizer._made = []
        try:
            if any(group.get("differentiable") for group in optimizer.param_groups):
                raise CannotFuseError("differentiable=True records every operation")
            return Launches(optimizer, self._params)
        except BaseException as error:
            optimizer._unmake()
            if isinstance(error, CannotFuseError):
                raise RuntimeError(
                    f"{type(optimizer).__name__} cannot update single parameters in backward, since {error}"
                ) from None
            raise
