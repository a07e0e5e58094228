"""TernGrad: gradients of three levels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.compressed_all_reduce import CompressedAllReduce, CompressionOptions
from bagua_kernels.algorithms.engine.compressed_exchange import CompressedExchange, Feedback
from bagua_kernels.algorithms.engine.exchange import Exchange
from bagua_kernels.algorithms.engine.vectors import euclidean_norm
from bagua_kernels.algorithms.policy.policy import Policy
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Work


@register
class TernGrad(CompressedAllReduce):
    """Gradients of three levels (Wen et al., NeurIPS 2017).

    1. Each rank clips its gradient, tensor by tensor, to `clip` times its root mean square (section 3.2 there, which takes the
       standard deviation). That is biased, and without it the largest element makes all others noise.
    2. Each element becomes -s, 0 or s at random and without bias, s being the largest magnitude of its block.
    3. Ranks average by `CompressedAllReduce`. With `shared` they agree on s by a maximum over ranks instead, so that the
       network itself adds up the levels (the paper's scaler sharing).
    """

    name = "terngrad"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        block: int = 512,
        shared: bool = False,
        clip: float | None = 2.5,
        **options: Unpack[CompressionOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            block: elements that share a scale; see `compression.TernGrad`.
            shared: True if ranks share scales.
            clip: root mean squares of a tensor's gradient to which it is clipped; None does not clip.
            **options: as for `CompressedAllReduce`.

        Raises:
            ValueError: `clip` is not above 0, or as for `CompressedAllReduce`.
        """
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be above 0, or None, got {clip}")
        if shared and options.get("error_feedback"):
            raise ValueError("shared scales allow no error feedback: they come from outside, not from what is encoded")
        self.clip = clip
        super().__init__(module, optimizer, codec=compression.TernGrad(block, shared), **options)

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        """See `GradientAlgorithm.exchange_for`."""
        if self.clip is None:
            return CompressedExchange(bucket, communicator, self.policy, self.feedback)
        return ClippedExchange(bucket, communicator, self.policy, self.feedback, self.clip)


class ClippedExchange(CompressedExchange):
    """Clips what is to be compressed, tensor by tensor."""

    delivers = True  # nothing follows

    def __init__(
        self, bucket: Bucket, communicator: Communicator, policy: Policy, feedback: Feedback, clip: float
    ) -> None:
        """As `CompressedExchange`, and takes the root mean squares to which gradients are clipped."""
        super().__init__(bucket, communicator, policy, feedback)
        self.clip = clip

    @torch.no_grad()
    def run(self, step: int) -> Iterator[Work]:
        """See `Exchange.run`."""
        if self.codec(step) is not None:
            for slot, view in enumerate(self.bucket.views):
                if view.numel() and self.bucket.compressed(slot):
                    most = (self.clip / view.numel() ** 0.5 * euclidean_norm(view)).to(view.dtype)
                    # What is not finite stays so, for others to see.
                    view.copy_(torch.where(most.isfinite(), view.clamp(-most, most), view))
        yield from super().run(step)
