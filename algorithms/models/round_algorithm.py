"""Algorithms whose exchanges belong to steps: one round of exchanges of all buckets for a step, or for some."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from typing import Unpack

import torch

from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.model_algorithm import ModelAlgorithm, ModelOptions
from bagua_kernels.algorithms.models.plan import Plan
from bagua_kernels.algorithms.models.round import Round
from bagua_kernels.algorithms.models.rounds import Rounds, RoundsOptions
from bagua_kernels.bucket import Bucket


class RoundOptions(ModelOptions, total=False):
    """Keyword arguments of `RoundAlgorithm`."""

    interval: int


class RoundAlgorithm(ModelAlgorithm):
    """Base of the algorithms that exchange all buckets after a step, or beside it.

    All ranks take the same number of steps, at their own pace: a rank waits for the neighbours of its round, and for no one
    else. A rank that leaves out `optimizer.step()` calls `skip_step()` instead.

    A subclass has `round_for`, which makes the `Round` of a bucket.

    Attributes:
        rounds: what takes place between steps; None for one rank alone.
        interval: the number of steps for which there is one round.
        delay: the number of optimizer's steps that come before results are put in place.
    """

    delay = 0

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        interval: int = 1,
        **options: Unpack[ModelOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `ModelAlgorithm`.
            optimizer: as for `ModelAlgorithm`.
            interval: the number of steps for which there is one round of exchanges.
            **options: as for `ModelAlgorithm`.

        Raises:
            TypeError: as for `ModelAlgorithm`.
            ValueError: `interval` is below 1, or as for `ModelAlgorithm`.
        """
        if interval < 1:
            raise ValueError(f"interval must be at least 1, got {interval=}")
        self.interval = interval
        self.rounds: Rounds | None = None
        super().__init__(module, optimizer, **options)

    @abc.abstractmethod
    def round_for(self, local: LocalModel, bucket: Bucket) -> Round:
        """Returns the rounds of a bucket; called for each bucket, in the same order on all ranks.

        Args:
            local: this rank's model.
            bucket: of its parameters.
        """

    def loop_for(self, local: LocalModel, options: RoundsOptions | None = None) -> Rounds:
        """See `ModelAlgorithm.loop_for`. A subclass that makes what the rounds of all buckets share does that before.

        Args:
            local: this rank's model.
            options: how rounds take place; by default with `delay` alone.
        """
        rounds = [self.round_for(local, bucket) for bucket in local.flat.buckets]
        self.rounds = Rounds(local, rounds, Plan(self.interval), options or RoundsOptions(delay=self.delay))
        return self.rounds

    def skip_step(self) -> None:
        """Takes part in a round without an optimizer's step, for example because this rank leaves out a bad batch."""
        if self.rounds is None:
            self.local.steps += 1
        else:
            self.rounds.skip_step()

    @contextlib.contextmanager
    def join(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Lets ranks have different numbers of batches: a rank that is through goes on mixing until all are.

        1. Within the block a rank announces each round in which it takes part to all others.
        2. At the end of the block it announces that it is through.
        3. It then takes part in each round that another rank has announced, without a step of its own.
        4. When all ranks are through, all have taken part in the same rounds.

        Parameters and states stay this rank's; call `synchronize()` for their mean. All ranks enter the block at the same step.

        Args:
            optimizer: not needed, for its state stays local.
        """
        with contextlib.nullcontext() if self.rounds is None else self.rounds.join():
            yield
