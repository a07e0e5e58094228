"""One bucket of parameters in the rounds of an algorithm: its exchange, and what is kept from one round to the next."""

from __future__ import annotations

import abc
import enum
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from bagua_kernels.algorithms.exchanges.vectors import Named
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Work


class When(enum.Enum):
    """Between which points of training exchanges take place, and so when their results are put in place.

    Attributes:
        BESIDE_STEP: they begin before the forward pass, and end before the optimizer's step.
        BEFORE_FORWARD: they begin after the optimizer's step, and end before the next forward pass.
        BEFORE_NEXT: they begin after the optimizer's step, and end before the next round, beside all that lies between.
    """

    BESIDE_STEP = "step"
    BEFORE_FORWARD = "forward"
    BEFORE_NEXT = "round"


class Round(abc.ABC):
    """The rounds of one bucket. One is made for each bucket when a module is wrapped, in the same order on all ranks.

    A subclass has `run`, and `merge` where parameters change when the exchange is over.

    Attributes:
        when: between which points exchanges take place; the same for all buckets.
        local: this rank's model.
        bucket: of its parameters.
        changes_beside: True if what is kept changes beside training, so that others wait for the exchange before they read it.
    """

    when: ClassVar[When] = When.BEFORE_FORWARD
    changes_beside: ClassVar[bool] = False

    def __init__(self, local: LocalModel, bucket: Bucket) -> None:
        """Begins with nothing that is kept."""
        self.local, self.bucket = local, bucket

    @abc.abstractmethod
    def run(self, number: int) -> Iterator[Work]:
        """Exchanges the bucket; yields each communication that it waits for.

        What comes before the first `yield` runs on the training thread, and reads parameters. The rest runs beside training: it
        neither reads nor writes parameters.

        Args:
            number: of the round, from 0, equal on all ranks.
        """

    def take_result(self, number: int) -> None:  # noqa: B027
        """Uses the result of the exchange, whose memory others may have then; parameters stay as they are.

        It is called on the training thread, before `merge`: right before it, or when another bucket needs the memory.

        Args:
            number: of the round. The exchanges of the buckets before this one have ended, too.
        """

    def merge(self, number: int) -> None:  # noqa: B027
        """Puts the result of the exchange in place, on the training thread.

        Args:
            number: of the round. The exchanges of the buckets before this one have ended, too.
        """

    def merged(self, number: int) -> None:  # noqa: B027
        """Called when the results of all buckets of a round are in place."""

    def placed(self, number: int) -> None:  # noqa: B027
        """Called after that, when parameters have the values with which training goes on."""

    def takes_part(self, number: int) -> bool:
        """Returns True if the bucket is exchanged in a round; equal on all ranks."""
        return True

    def arrived(self, call: str) -> None:  # noqa: B027
        """Called when all ranks have come to a call, and nothing is under way."""

    def mean_source(self) -> torch.Tensor:
        """Returns the vector whose mean over all ranks is that of the bucket's parameters."""
        return self.bucket.flat

    def restart(self) -> None:  # noqa: B027
        """Sets what is kept to what it is where all ranks have the same parameters."""

    def follow(self) -> None:  # noqa: B027
        """Lets what is kept follow parameters that were written from outside."""

    def kept(self, key: str, *, saved: bool = True) -> torch.Tensor:
        """Returns a vector beside the bucket, see `FlatParameters.kept`."""
        return self.local.flat.kept(self.bucket, key, saved=saved)

    def exchange_number(self, number: int) -> int:
        """Returns the number of the bucket's exchange in a round, for `Mailbox.exchange` or `Mixer.exchange`."""
        return number * len(self.local.flat.buckets) + self.bucket.index

    def state(self) -> dict[str, Named]:
        """Returns what checkpoints contain of it beside the vectors that are `kept`: by key, a tensor for each parameter."""
        return {}

    def load(self, state: Mapping[str, Named]) -> None:  # noqa: B027
        """Restores what `state` returned; what it lacks begins anew."""

    def numbers(self) -> dict[str, Any]:
        """Returns the numbers that checkpoints contain of it; what all buckets have in common has the same name in each."""
        return {}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:  # noqa: B027
        """Restores what `numbers` returned."""

    def residual_norm(self) -> float:
        """Returns the Euclidean norm of what this rank's payloads have lacked so far."""
        return 0.0

    def disagreement(self) -> tuple[float, int] | None:
        """Returns a sum of squares of differences from neighbours, and the number of its terms; None if it is not known."""
        return None
