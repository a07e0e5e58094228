"""A wrapped module, as a training loop sees it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

# What every module has; the rest of an algorithm's attributes are not its copies'.
_OF_MODULES = frozenset(torch.nn.Module().__dict__)


class WrappedModule(torch.nn.Module):
    """A module and what a training loop may call beside it. By itself it exchanges nothing: gradients stay this rank's.

    Copies, by `copy.deepcopy` or pickle, are `LocalCopy`s.

    Attributes:
        module: the wrapped module.
        optimizer: that which it was given or made; None without one.
        weighable: True if ranks may have weights, which `join` uses.
    """

    weighable = True
    module: torch.nn.Module
    optimizer: torch.optim.Optimizer | None = None
    _syncs = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        return self.module(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """What copies and pickles are made of: the module, and what every module has, such as hooks."""
        state = {name: value for name, value in self.__dict__.items() if name in _OF_MODULES}
        return LocalCopy, (), state

    def _replicate_for_data_parallel(self) -> WrappedModule:
        raise RuntimeError(
            f"{type(self).__name__} exchanges the gradients of one replica a process: leave out torch.nn.DataParallel, and "
            "start a process for each GPU, such as with torchrun"
        )

    @property
    def require_backward_grad_sync(self) -> bool:
        """False while backward passes accumulate gradients locally, as within `no_sync`; may be set.

        A pass follows the value that it begins with. Loops that accumulate set it to True for the last micro-batch of a step.
        Algorithms that exchange parameters accept it; their backward passes send nothing in any case.
        """
        return self._syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._set_sync(bool(value))

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Sets `require_backward_grad_sync`, by the name that FSDP2 has for it.

        Args:
            requires_gradient_sync: False to accumulate gradients locally.
            recurse: True, since all gradients of a module are exchanged or none.

        Raises:
            ValueError: `recurse` is False.
        """
        if not recurse:
            raise ValueError(f"all gradients are exchanged or none, got {recurse=}, expected True: leave it out")
        self.require_backward_grad_sync = requires_gradient_sync

    def _set_sync(self, value: bool) -> None:
        """Stores whether backward passes exchange gradients."""
        self._syncs = value

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this block, backward passes accumulate gradients locally; the next one outside exchanges the sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def weigh(self, weight: float) -> None:
        """Gives this rank's next gradients a weight, such as its number of samples; collective, before the forward pass.

        The next mean becomes a weighted one: `sum(w_r g_r) / sum(w_r)` over ranks r. Call `zero_grad` before: gradients that
        are still there would be weighted again.

        Raises:
            ValueError: on all ranks, if a weight is negative or not finite or all are zero; or the algorithm knows no weights.
        """
        self._check_weighable()
        check_weights([weight])

    @contextlib.contextmanager
    def join(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Lets ranks have different numbers of batches: within this block, those that are through take part with weight 0.

        Every forward pass in it announces to the others that this rank still trains. At the end of the block a rank takes part
        in the exchanges of the others until none is left. Then it takes over the parameters and buffers of the last rank.
        Means are over the ranks that still train. Every exchanging backward pass needs one forward pass in training mode.

        Args:
            optimizer: if given, on all ranks, it takes over the state of that rank's too.

        Raises:
            ValueError: the algorithm knows no weights.
        """
        self._check_weighable()
        yield

    def _check_weighable(self) -> None:
        if not self.weighable:
            raise ValueError(
                f"{type(self).__name__} as it was made knows no weights, and so neither weigh() nor join()"
            )

    def synchronize(self) -> None:
        """Makes parameters equal on all ranks; collective. Algorithms that average gradients keep them equal: nothing happens."""

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The module has the mean parameters of all ranks within the block; where all have the same, nothing happens."""
        yield

    def wait(self) -> None:
        """Puts in place what is exchanged beside training. Where backward waits for its exchanges, nothing happens."""

    def consensus(self) -> float:
        """Returns the root mean square distance of the ranks' parameters from their mean; 0 where they are equal."""
        return 0.0

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the averaged gradients so that their norm over all parameters is at most `max_norm`; call it after backward.

        Averaged gradients have the same bits on all ranks, so no message is needed.

        Returns:
            The norm before.

        Raises:
            RuntimeError: with `apply_in_backward` the gradients have been used by now.
        """
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)


class LocalCopy(WrappedModule):
    """A copy of a wrapped module, which exchanges nothing: it has no communicator, and gradients stay this rank's.

    That is what `copy.deepcopy` and pickle make, for running means of parameters, teachers, and files. It has the names of the
    state that it is a copy of, and may be trained by itself, or its `module` be wrapped anew.
    """


def check_weights(weights: Sequence[float]) -> None:
    """Raises unless all weights are such."""
    for rank, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weight must be finite and 0 or more, got {weight} on rank {rank}")
