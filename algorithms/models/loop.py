"""What exchanges parameters around the steps of training: rounds of all buckets, or averages beside training."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.stats import Stats
from bagua_kernels.comm import ReduceOp

# Calls of all ranks that leave parameters as they are.
READS = frozenset({"averaged()", "consensus()"})
Vectors = dict[str, dict[str, torch.Tensor]]


class Loop(abc.ABC):
    """What happens to the parameters of a model at the points of its training, and at calls to which all ranks come.

    Attributes:
        local: this rank's model.
    """

    def __init__(self, local: LocalModel) -> None:
        """Begins with a model whose parameters are in buckets; see `begin`."""
        self.local = local

    @abc.abstractmethod
    def at_forward(self, training: bool) -> None:
        """Called before each forward pass of the module; `training` is True in training mode if gradients are recorded."""

    def at_uncalled_step(self) -> None:  # noqa: B027
        """Called at the begin of a step before which there was no forward pass of the module."""

    @abc.abstractmethod
    def at_step_begin(self) -> None:
        """Called when the gradients are complete, before the optimizer's step changes parameters."""

    @abc.abstractmethod
    def at_step_end(self) -> None:
        """Called after the optimizer's step."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Waits for the exchanges under way, and puts their results in place."""

    @abc.abstractmethod
    def arrive(self, call: str) -> None:
        """Puts what is under way in place, for a call of all ranks, which may have taken different numbers of steps."""

    @abc.abstractmethod
    def restart(self) -> None:
        """Sets vectors beside the parameters to what they are where all ranks have the same parameters."""

    def prepare(self) -> None:  # noqa: B027
        """Makes what it needs beside rounds or averages, before `begin`; collective."""

    def begin(self) -> None:  # noqa: B027
        """Starts its threads; called once, when all else is ready for training."""

    def take_written(self, values: list[torch.Tensor]) -> None:
        """Goes on from parameters that were written; called between a backward pass and the optimizer's step.

        Args:
            values: a copy of each bucket, which is to be what the step begins with.
        """
        self.wait()
        self.local.put(values)

    def is_part_of_step(self) -> bool:
        """Returns True if what was written after a step counts as a part of it."""
        assert self.local.writes is not None
        return self.local.writes.belongs_to_step()

    def leaves_own(self) -> bool:
        """Returns True if parameters may differ between ranks where the optimizer has taken a step."""
        return True

    def mean_sources(self) -> Iterator[torch.Tensor]:
        """Yields for each bucket the vector whose mean over all ranks is that of its parameters."""
        return (bucket.flat for bucket in self.local.flat.buckets)

    def mean_of_ranks(self, vector: torch.Tensor) -> None:
        """Replaces a vector of floating point by its mean over all ranks; collective."""
        self.local.communicator.all_reduce(vector, ReduceOp.AVG).wait()

    def give_first(self, data: torch.Tensor) -> None:
        """Replaces bytes by those of the first rank; collective."""
        self.local.communicator.broadcast(data, 0).wait()

    def take_steps(self, steps: int) -> None:  # noqa: B027
        """Goes on with a number of steps."""

    def stats(self, stats: Stats) -> Stats:
        """Returns statistics with what this loop counts."""
        return stats

    def residual_norm(self) -> float:
        """See `Algorithm.residual_norm`."""
        return 0.0

    def vectors(self, *, copies: bool = True) -> Vectors:
        """Returns the vectors that checkpoints contain: by key, one flat tensor for each parameter's name.

        Args:
            copies: False for tensors that may change in the next round.
        """
        return self.local.flat.state(copies=copies)

    def load_vectors(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restores vectors of this rank, or of all earlier ranks if their number has changed: then they begin anew."""
        # One rank alone has none, and what follows begins anew.
        if len(states) == 1 and states[0]["vectors"]:
            self.local.flat.load(states[0]["vectors"])

    def numbers(self) -> dict[str, Any]:
        """Returns the numbers that checkpoints contain beside vectors."""
        return {}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:  # noqa: B027
        """Restores what `numbers` returned."""

    @property
    def unfinished(self) -> int | None:
        """The number of the step whose exchange has begun and was not finished; None if there is none, or it belongs to none."""
        return None

    def finish(self) -> None:  # noqa: B027
        """Takes part in what others do until all ranks have come to `close`."""

    def stop(self) -> None:  # noqa: B027
        """Ends its threads; calling it again does nothing."""
