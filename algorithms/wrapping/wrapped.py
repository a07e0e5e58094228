"""A module that exchanges its gradients, as a training loop sees it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bagua_kernels.algorithms.engine.backward_steps import BackwardSteps
from bagua_kernels.algorithms.engine.engine import Engine
from bagua_kernels.algorithms.wrapping.buffers import Buffers
from bagua_kernels.algorithms.wrapping.replicas import synchronize
from bagua_kernels.comm import Communicator

# What every module has; the rest of an algorithm's attributes are not its copies'.
_OF_MODULES = frozenset(torch.nn.Module().__dict__)


class WrappedModule(torch.nn.Module):
    """What may be called in a training loop beside `backward`; `Algorithm` makes the attributes.

    Copies, by `copy.deepcopy` or pickle, are `LocalCopy`s, which exchange nothing.

    Attributes:
        module: the wrapped module.
        broadcast_buffers: whether a forward pass in training begins with rank 0's buffers, or their means.
        average_buffers: whether with their means.
        weighable: whether ranks may have weights, of which `join` makes use.
    """

    weighable = True
    module: torch.nn.Module
    broadcast_buffers: bool = False
    average_buffers: bool = False
    _engine: Engine | None = None
    _steps: BackwardSteps | None = None
    _communicator: Communicator
    _lanes: list[Communicator]
    _buffers_of_ranks: Buffers
    _joining: bool = False
    _announced: int | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module.

        Raises:
            RuntimeError: a `DistributedDataParallel` around it is active; or it was closed, and this is a pass of training.
        """
        self._check_call()
        if self._engine is not None:
            self._engine.check_idle()
            if self._engine.enabled and self.training:
                self._engine.check_untrained()
                source = 0
                if self._joining:
                    source = self._announced if self._announced is not None else self._announce(1.0)
                self._announced = None
                if self.broadcast_buffers and self._communicator in self._lanes:
                    self._engine.complete()
                if self.average_buffers and not self._joining:
                    self._buffers_of_ranks.average(self._communicator)
                elif self.broadcast_buffers:
                    self._buffers_of_ranks.synchronize(self._communicator, source)
        return self.module(*args, **kwargs)

    def _check_call(self) -> None:
        """Raises if a forward pass would be in vain, or do harm."""

    def __reduce__(self) -> tuple[Any, ...]:
        """What copies and pickles are made of: the module, and what every module has, such as hooks."""
        self.wait()
        state = {name: value for name, value in self.__dict__.items() if name in _OF_MODULES}
        return LocalCopy, (), state

    def _replicate_for_data_parallel(self) -> WrappedModule:
        raise RuntimeError(
            f"{type(self).__name__} exchanges the gradients of one replica a process: leave out torch.nn.DataParallel, and "
            "start a process for each GPU, such as with torchrun"
        )

    def wait(self) -> None:
        """Waits until no update of parameters is under way, with `wait_in_forward`; else there never is when backward has ended.

        Needed only before parameters are read by references that were taken before, such as a list of them.

        Raises:
            Exception: what went wrong in the exchange; a RuntimeError if that was told before.
        """
        if self._engine is not None:
            self._engine.complete()
            self._engine.check_idle()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this block, backward passes accumulate gradients locally; the next one outside exchanges the sum."""
        if self._engine is None:
            yield
            return
        before, self._engine.enabled = self._engine.enabled, False
        try:
            yield
        finally:
            self._engine.enabled = before

    def weigh(self, weight: float) -> None:
        """Gives this rank's next gradients a weight, such as its number of samples; collective, before the forward pass.

        The next mean becomes a weighted one: `sum(w_r g_r) / sum(w_r)` over ranks r. Call `zero_grad` before: gradients that
        are still there would be weighted again.

        Raises:
            ValueError: on all ranks, if a weight is negative or not finite or all are zero; or the algorithm knows no weights.
        """
        self._check_weighable()
        if self._engine is None:
            _check_weights([weight])
            return
        self._announced = self._announce(weight)
        if self._announced < 0:
            raise ValueError("all ranks gave the weight 0, so there is nothing to average")

    @contextlib.contextmanager
    def join(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Lets ranks have different numbers of batches: within this block, those that are through take part with weight 0.

        Every forward pass in it tells the others that this rank still trains. At its end a rank takes part in the
        exchanges of the others until none is left, and then takes over the parameters and buffers of the last that trained.
        Means are over the ranks that still train. Every exchanging backward pass needs one forward pass in training mode.

        Args:
            optimizer: if given, on all ranks, it takes over the state of that rank's too.

        Raises:
            ValueError: the algorithm knows no weights.
        """
        self._check_weighable()
        self._joining, self._announced = True, None
        try:
            yield
            last = 0
            while self._engine is not None and (source := self._announce(0.0)) >= 0:
                last = source
                if self.broadcast_buffers and self.training:
                    self._buffers_of_ranks.synchronize(self._communicator, source)
                self._engine.take_part()
            if self._engine is not None:
                last = max(self._communicator.all_gather_object(last))
                synchronize([*self.module.parameters(), *self.module.buffers()], self._communicator, last)
                if optimizer is not None:
                    optimizer.load_state_dict(self._communicator.broadcast_object(optimizer.state_dict(), last))
        finally:
            self._joining = False

    def _check_weighable(self) -> None:
        self._check_call()
        if not self.weighable:
            raise ValueError(
                f"{type(self).__name__} as it was made knows no weights, and so neither weigh() nor join()"
            )

    def _announce(self, weight: float) -> int:
        """Tells all ranks this one's weight; returns the first rank that has one, or -1 if none has."""
        assert self._engine is not None
        self._engine.conclude()
        weights = torch.empty(self._communicator.size, dtype=torch.float64, device=self._communicator.device)
        self._communicator.all_gather(weights, weights.new_tensor([weight])).wait()
        given = weights.tolist()
        _check_weights(given)
        total = math.fsum(given)
        self._engine.weight = weight * len(given) / total if total else 1.0  # nobody takes another step
        return next((rank for rank, w in enumerate(given) if w > 0), -1)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the averaged gradients so that their norm over all parameters is at most `max_norm`; call it after backward.

        Averaged gradients have the same bits on all ranks, so no message is needed.

        Returns:
            The norm before.

        Raises:
            RuntimeError: with `apply_in_backward` the gradients have been used by now.
        """
        if self._steps is not None:
            raise RuntimeError(
                "with apply_in_backward=True parameters are updated before all gradients are known, so that these cannot be "
                "clipped by their norm; leave it out"
            )
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)


class LocalCopy(WrappedModule):
    """A copy of a wrapped module, which exchanges nothing: it has no communicator, and gradients stay this rank's.

    That is what `copy.deepcopy` and pickle make, for running means of parameters, teachers, and files. It has the names of the
    state that it is a copy of, and may be trained by itself, or its `module` be wrapped anew.
    """


def _check_weights(weights: Sequence[float]) -> None:
    """Raises unless all weights are such."""
    for rank, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weight must be finite and 0 or more, got {weight} on rank {rank}")
