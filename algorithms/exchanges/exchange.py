"""What happens to one bucket: an exchange replaces its gradients by their means over all ranks."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from bagua_kernels.algorithms.exchanges.vectors import Named
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Work
from bagua_kernels.comm.compressed import Deliver
from bagua_kernels.compression import Codec
from bagua_kernels.launchers.multitensor import TensorUpdate

WHOLE = "whole owner"  # the key of what ranks have in parts, where each has all of it

_OF_RUN = (
    "reads_in_place",
    "one_collective",
    "delivers",
    "has_memory",
    "keeps_means",
    "needs_increments",
)


class Updates(Protocol):
    """What updates the parameters of one bucket by means that are still encoded."""

    def from_payloads(self, codec: Codec) -> AbstractContextManager[Deliver | None]:
        """What takes the mean's payloads; None if the mean has to be decoded into the bucket."""

    def from_factors(self, slots: Sequence[int]) -> AbstractContextManager[dict[int, TensorUpdate] | None]:
        """What updates the tensors of some slots by a mean of thin factors; None if that has to be multiplied."""


class Exchange(abc.ABC):
    """The exchange of one bucket in step after step, with its own state.

    The bucket's tensors are others where a gradient of before is kept: `run` takes them from `bucket` each time.

    A class with another `run`, its own or a mixin's, does not inherit the attributes below that are about `run`. It sets them
    again. By default gradients are in the bucket before `run`, and the mean is expected there afterwards.

    It knows its bucket and its communicator. Its driver fills the bucket, lists its frozen tensors (`Bucket.frozen`), and
    sets the loss scale if there is one. It waits for each work that `run` yields. All ranks run the exchanges of one
    communicator in the same order.

    Attributes:
        bucket: whose `flat` and `exact` are replaced.
        communicator: the ranks.
        loss_scale: the factor of the gradients that are in the state.
        updates: if given, it may take the mean instead of the bucket.
        reads_in_place: True if `run` reads gradients that are to be compressed from `Bucket.lent`, in place.
        one_collective: True if `run` makes one collective, so that several exchanges may share a communicator.
        delivers: True if `run` may give the mean to `updates` instead of the bucket.
        has_memory: True if a mean may be other than zero though no rank has a gradient in this step.
        keeps_means: True if a mean comes out as it went in, so that gradients may contain one of an earlier pass. Otherwise
            they are what has been added to it.
        needs_increments: True if a gradient that contains an earlier mean is to be refused, where what was added is not known.
    """

    reads_in_place = False
    one_collective = False
    delivers = False
    has_memory = True
    keeps_means = False
    needs_increments = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        # What an attribute promises of another class's `run` does not hold for one that comes before it.
        places = [vars(base) for base in cls.__mro__]
        runs = next(place for place, names in enumerate(places) if "run" in names)
        for name in _OF_RUN:
            if not any(name in names for names in places[: runs + 1]):
                setattr(cls, name, vars(Exchange)[name])

    def __init__(self, bucket: Bucket, communicator: Communicator) -> None:
        """Begins without state."""
        self.bucket = bucket
        self.communicator = communicator
        self.loss_scale = 1.0
        self.updates: Updates | None = None

    @abc.abstractmethod
    def run(self, step: int) -> Iterator[Work]:
        """Replaces `bucket.flat` and `bucket.exact` by their means over all ranks; yields each collective that it waits for.

        Args:
            step: number of the backward pass, equal on all ranks.
        """

    def state(self) -> dict[str, Named]:
        """Returns the state without loss scale, for each key one tensor per parameter's name; collective."""
        return {}

    def own_state(self) -> dict[str, Named]:
        """Returns what this rank has of `state`, in memory of its own. Not collective, for ranks may be lost.

        Of what ranks have in parts ("owner"), the others' parts are zero; unless each rank has all of it, as `WHOLE`.
        """
        return {key: {name: each.clone() for name, each in named.items()} for key, named in self.state().items()}

    def mark(self, spare: list[torch.Tensor]) -> Callable[[], dict[str, Named]]:
        """Keeps what this rank has of `state` as it is now, before a pass that may be lost.

        Args:
            spare: memory of the last call, which is used again where it fits. It is replaced by what was used.

        Returns:
            What goes back to that, and returns what `own_state` had then. After it the exchange is used no more.
        """
        state = self.own_state()
        return lambda: state

    def load(self, state: Mapping[str, Named]) -> None:  # noqa: B027
        """Restores what `state` returned, maybe for more parameters than this bucket's; what is lacking starts anew."""

    def take_over(self, other: Exchange) -> bool:
        """Goes on with what another exchange of this bucket remembers, without a copy, if it knows how to.

        Args:
            other: of which no step is under way; if it was taken over, it cannot be used any more.

        Returns:
            True if it was. The state is then as if `load` had got the other's, but for factors that do not fit here.
        """
        return False

    def scale_to(self, loss_scale: float) -> None:
        """Brings the state to another loss scale."""
        factor, self.loss_scale = loss_scale / self.loss_scale, loss_scale
        if factor != 1.0:
            self.rescale(factor)

    def rescale(self, factor: float) -> None:  # noqa: B027
        """Multiplies the state, because the loss scale changed. A power of two, as scales are, rounds nothing."""

    def end_step(self, unused: Sequence[int]) -> None:  # noqa: B027
        """Called after each step, when no exchange is under way.

        Args:
            unused: slots of the tensors for which no rank had a gradient, frozen ones left out.
        """

    def residual_norm(self) -> float:
        """Returns the Euclidean norm of this rank's residuals, without loss scale."""
        return 0.0
