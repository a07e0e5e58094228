"""TernGrad: gradients of three levels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.compressed import CompressedAllReduce, CompressionOptions
from bagua_kernels.algorithms.exchanges.compressed import CompressedExchange, Feedback
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.vectors import euclidean_norm
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

    Options and their defaults, all by keyword::

        block=512                elements that share a scale; see `compression.TernGrad`
        shared=False             True if ranks share scales
        clip=2.5                 root mean squares of a tensor's gradient to which it is clipped; None does not clip
        error_feedback=None      True if each rank keeps what its payloads lack; by default if the codec is biased
        owner_feedback=None      True if the owners of chunks do; by default as `error_feedback`
        warmup_steps=0           steps without compression at the beginning
        groups=None              other codecs for parameters whose names match a pattern: `{"*.embedding.*": "topk"}`
        exact=()                 patterns of names of parameters to average without compression; "1d" for all biases and
                                 norms
        min_numel=0              parameters with fewer elements are exact too
        seed=0                   of random numbers
        guard=None               measures now and then how much is lost; `stats().errors` has the results
        scaler=None              that by which losses are scaled, if any: residuals change their unit with it
        only_if_faster=False     True to measure in 36 steps if compression is faster than none, by turns of four steps
                                 with it and four without
        bucket_bytes=10485760    gradients are exchanged in buckets of about this size; the first ones may be smaller
        in_flight=None           buckets that are exchanged at a time, each on a thread and connections of its own; by
                                 default 2 on CPUs, 1 on GPUs
        apply_in_backward=False  True to update each bucket's parameters as soon as its mean has arrived, while backward
                                 goes on
        communicator=None        the ranks that train together; those of `comm.init()` if None, which is called if it
                                 has not been
        hierarchical=None        True to average inside nodes in full precision first, and then between them; False for
                                 never; None where nodes have several ranks
        nodes=None               which ranks share a node, such as `[[0, 1], [2, 3]]`; found by the hosts if None
        broadcast_buffers=True   True to begin each forward pass in training mode with rank 0's buffers on all ranks
        average_buffers=False    a pattern of names, as of `fnmatch`, or several
        verify_every=None        steps from one comparison of what all ranks have alike to the next; None for none
        on_failure='raise'       "raise", or "heal": when ranks are lost, those that are left go on without an error
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
