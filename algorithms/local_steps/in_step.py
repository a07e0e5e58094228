"""Rounds of local steps in which all ranks are in step: each waits for the pseudo-gradients of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from bagua_kernels.algorithms.local_steps.outer_round import OuterRound
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.plan import Plan
from bagua_kernels.comm import Work
from bagua_kernels.comm.work import FINISHED


class InStep:
    """Takes the mean of all ranks' pseudo-gradients, with the ranks' weights before it.

    Attributes:
        samples: of this rank in the round under way, as far as they were counted.
    """

    def __init__(self, local: LocalModel, plan: Plan, weighs: bool) -> None:
        """Begins without samples.

        Args:
            local: this rank's model.
            plan: which steps have a round.
            weighs: False if all ranks have the same weight, whatever their numbers of samples.
        """
        self.samples = 0.0
        self._local, self._plan, self._weighs = local, plan, weighs

    def exchange(self, part: OuterRound, number: int) -> Iterator[Work]:
        """See `Collection.exchange`."""
        local, weighing, difference = self._local, part.weighing, part.difference
        steps = self._plan.steps_of(local.communicator.size)[local.communicator.rank]
        samples = (self.samples or steps) if self._weighs else 1.0
        speed = self._plan.speed(local.wait_seconds)
        # The training thread goes on from here.
        yield FINISHED
        if part.agreement is not None:
            yield from part.agreement.begin(part.bucket.index)
        if weighing is not None:
            yield from weighing.weigh(difference, samples, speed)
        if part.agreement is not None:
            part.agreement.sent(difference.flat)
        if local.communicator.size > 1:
            yield from part.exchange.run(number)
            difference.clear_gaps(difference.flat)
        if part.agreement is not None:
            part.agreement.received(difference.flat)
        if weighing is not None:
            yield from weighing.clip(difference)

    def means(self, part: OuterRound) -> Iterable[torch.Tensor]:
        """See `Collection.means`."""
        return [part.difference.flat]
