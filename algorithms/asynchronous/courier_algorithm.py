"""Algorithms whose exchanges a courier makes beside training."""

from __future__ import annotations

import abc

from bagua_kernels.algorithms.asynchronous.averages import Averages
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.model_algorithm import ModelAlgorithm


class CourierAlgorithm(ModelAlgorithm):
    """Base of the algorithms that exchange parameters beside training, whatever other ranks' training does.

    Ranks may take different numbers of steps: `close`, `synchronize` and the other collective calls wait until all ranks have
    come there. Until then this rank takes part in what the others do, with its last model.

    A subclass has `averages_for`.

    Attributes:
        averages: what takes place beside training; None for one rank alone.
    """

    averages: Averages | None = None

    @abc.abstractmethod
    def averages_for(self, local: LocalModel) -> Averages:
        """Returns what takes place beside training; collective."""

    def loop_for(self, local: LocalModel) -> Averages:
        """See `ModelAlgorithm.loop_for`."""
        self.averages = self.averages_for(local)
        self.averages.courier.end_with(self)
        return self.averages
