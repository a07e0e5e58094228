"""The weights of ranks in the mean of their pseudo-gradients, where they are not all alike."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bagua_kernels.algorithms.local_steps.pace import Pace
from bagua_kernels.algorithms.local_steps.penalty import Norms, Penalty, clip_factor, weights_of
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Work


class Weighing:
    """Multiplies a bucket's pseudo-gradients by weights on their way, in a small collective before theirs.

    A rank's weight is the number of its samples in the round, and less by a penalty. With equal weights nothing is multiplied.
    """

    def __init__(
        self, communicator: Communicator, index: int, penalty: Penalty | None, pace: Pace | None, warned: set[str]
    ) -> None:
        """Begins without norms.

        Args:
            communicator: of all ranks.
            index: of the bucket.
            penalty: for norms; None for none.
            pace: gets the speeds of the ranks; None if all take as many steps.
            warned: of what there was a warning, in any bucket.
        """
        self._communicator, self._index, self._penalty, self._pace = communicator, index, penalty, pace
        self._norms = None if penalty is None else Norms(penalty)
        self._void = 0
        self._warned = warned

    def weigh(self, difference: Bucket, samples: float, speed: float) -> Iterator[Work]:
        """Multiplies this rank's pseudo-gradient by its weight over the mean weight.

        Args:
            difference: the pseudo-gradient, replaced.
            samples: of this rank in the round.
            speed: this rank's steps per second.
        """
        norm = 0.0
        if self._norms is not None:
            norm = self._judged(self._norms, difference)
        # waits: once a round, if ranks are weighed.
        own = torch.tensor([samples, speed, norm], dtype=torch.float64, device=difference.flat.device)
        everyone = own.new_empty((self._communicator.size, 3))
        yield self._communicator.all_gather(everyone, own)
        # waits: once a round, if ranks are weighed.
        rows = everyone.tolist()
        if self._pace is not None:
            self._pace.measured([row[1] for row in rows])
        by_norm = weights_of([row[2] for row in rows])
        weights = [row[0] * weight for row, weight in zip(rows, by_norm, strict=True)]
        if self._penalty is not None:
            self._count_void([row[2] for row in rows])
        own_weight, mean = weights[self._communicator.rank], sum(weights) / len(weights)
        if own_weight == 0:
            difference.flat.zero_()  # it may not be finite
        elif own_weight != mean:
            difference.flat.mul_(own_weight / mean)

    def clip(self, difference: Bucket) -> Iterator[Work]:
        """Clips a mean. Norms depend on the number of threads, so that rank 0's decides for all."""
        if self._penalty is None or self._penalty.clip is None:
            return
        norm = torch.full((1,), _norm(difference), dtype=torch.float64, device=difference.flat.device)
        yield self._communicator.broadcast(norm, 0)
        # waits: once a round, if pseudo-gradients are clipped.
        factor = clip_factor(float(norm), self._penalty.clip)
        if factor != 1.0:
            difference.flat.mul_(factor)

    def counts(self) -> dict[str, int]:
        """Returns what the penalty has done here, in exchanges of the bucket: see `Stats.guards`."""
        if self._norms is None:
            return {}
        return {"left out": self._norms.left_out, "void": self._void, "restarted": self._norms.restarts}

    def _judged(self, norms: Norms, difference: Bucket) -> float:
        length = _norm(difference)
        restarts, judged = norms.restarts, norms.judged(length)
        about = (
            f"rank {self._communicator.rank} in bucket {self._index}, whose pseudo-gradient has the norm {length:.3g}"
        )
        if math.isinf(judged):
            self._warn("left out", f"the penalty leaves out {about}")
        if norms.restarts > restarts:
            self._warn(
                "restarted", f"the penalty takes such norms for usual from now on, and no longer leaves out {about}"
            )
        return judged

    def _count_void(self, norms: list[float]) -> None:
        if all(map(math.isinf, norms)):
            self._void += 1
            if self._communicator.rank == 0:
                self._warn("void", "the penalty leaves out all ranks, so that a round changes nothing in a bucket")

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            more = "see Penalty, and stats().guards for how often; this is logged once"
            warnings.warn(f"{text}: {more}", RuntimeWarning, stacklevel=2)

    def numbers(self) -> dict[str, Any]:
        """Returns what a checkpoint contains of it."""
        return {} if self._norms is None else {"penalty": {str(self._index): self._norms.numbers()}}

    def load(self, numbers: Mapping[str, Any]) -> None:
        """Restores what `numbers` returned; if that is lacking the norms begin anew."""
        own = numbers.get("penalty", {}).get(str(self._index))
        if own is not None and self._norms is not None:
            self._norms.load(own)


def _norm(difference: Bucket) -> float:
    return float(difference.flat.norm(dtype=torch.float64))
