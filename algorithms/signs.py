"""Algorithms that send one bit an element."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.compressed import LARGE_MATRICES, CompressedAllReduce
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm.compressed import Deliver
from bagua_kernels.compression import Codec


@register
class SignSGD(CompressedAllReduce):
    """Each rank sends signs.

    With `majority_vote` (Bernstein et al., "signSGD with Majority Vote", ICLR 2019, algorithm 1):

    1. Each rank takes the signs of its gradient; that of zero is +1.
    2. Ranks average them by `CompressedAllReduce`.
    3. The gradient becomes the sign of that mean, +1 or -1; a tie is +1.

    Gradients have unit size then, so that learning rates are those of sign methods, 1e-4 to 1e-3. There are problems on which
    it does not converge.

    Without, which is the default, error feedback mends that (EF-signSGD, Karimireddy et al., ICML 2019, algorithm 1):

    1. Each rank adds its residual to its gradient, and sends signs and, for each block, the mean magnitude.
    2. Owners of chunks do the same with the mean.
    3. Gradients have their usual size, and learning rates are those of SGD.
    """

    name = "sign"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        block: int = 256,
        majority_vote: bool = False,
        **arguments: Any,
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            block: elements that share a magnitude; see `compression.Sign`.
            majority_vote: whether gradients become signs.
            **arguments: as for `CompressedAllReduce`; but for a vote, `exact` and `min_numel` are `LARGE_MATRICES`.

        Raises:
            ValueError: a vote with error feedback, which it has none of, or with `only_if_faster`; or as for
                `CompressedAllReduce`.
        """
        self.majority_vote = majority_vote
        if majority_vote:
            if arguments.get("only_if_faster"):
                raise ValueError(
                    "a vote's gradients are signs, for which learning rates are others than for the means of steps without "
                    "compression: leave out only_if_faster, or majority_vote"
                )
            if arguments.get("error_feedback") or arguments.get("owner_feedback"):
                raise ValueError("a majority vote has no error feedback: leave out majority_vote, or the feedback")
            # A rank without a gradient would have to abstain, for which there is no sign.
            self.weighable = self.late = False
            arguments = {**arguments, "error_feedback": False, "owner_feedback": False}
        else:
            arguments = {**LARGE_MATRICES, **arguments}
        super().__init__(module, optimizer, codec=compression.Sign(block), **arguments)

    def exchange(self, bucket: Bucket, step: int) -> None:
        """See `Algorithm.exchange`."""
        votes = self.majority_vote and self.codec_at(bucket, step) is not None
        if votes:
            _to_signs(bucket.flat)
        super().exchange(bucket, step)
        if votes:
            _to_signs(bucket.flat)

    def _delivery(self, bucket: Bucket, codec: Codec, possible: bool) -> AbstractContextManager[Deliver | None]:
        # Votes are not what payloads decode to.
        return super()._delivery(bucket, codec, possible and not self.majority_vote)


def _to_signs(x: torch.Tensor) -> None:
    """Replaces each element by +1 or -1; what is not finite stays, for others to see."""
    x.copy_(torch.where(x.isfinite(), torch.where(x < 0, x.new_tensor(-1.0), x.new_tensor(1.0)), x))


@register
class OneBitSGD(CompressedAllReduce):
    """Signs with two magnitudes a block (Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014).

    1. In the first `warmup_steps` steps, average without compression: early gradients change too fast for residuals.
    2. Then each rank adds its residual to its gradient, and sends signs and, for each block (the paper: for each column), the
       mean of the elements below zero and that of the others.
    3. Owners of chunks do the same with the mean.
    """

    name = "onebit"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        block: int = 256,
        warmup_steps: int = 100,
        **arguments: Any,
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            block: elements that share magnitudes; see `compression.Sign`.
            warmup_steps: steps without compression at the beginning.
            **arguments: as for `CompressedAllReduce`; `exact` and `min_numel` are `LARGE_MATRICES`.
        """
        codec = compression.Sign(block, two_means=True)
        super().__init__(
            module, optimizer, codec=codec, **{"warmup_steps": warmup_steps, **LARGE_MATRICES, **arguments}
        )
