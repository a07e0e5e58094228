"""SignSGD: gradients travel as signs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.compressed import LARGE_MATRICES, CompressedAllReduce, CompressionOptions
from bagua_kernels.algorithms.exchanges.compressed import CompressedExchange
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Work


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

    Options and their defaults, all by keyword::

        block=256                elements that share a magnitude; see `compression.Sign`
        majority_vote=False      True if gradients become signs
        error_feedback=None      True if each rank keeps what its payloads lack; by default if the codec is biased
        owner_feedback=None      True if the owners of chunks do; by default as `error_feedback`
        warmup_steps=0           steps without compression at the beginning
        groups=None              other codecs for parameters whose names match a pattern: `{"*.embedding.*": "topk"}`
        exact='1d'               patterns of names of parameters to average without compression; "1d" for all biases and
                                 norms
        min_numel=512            parameters with fewer elements are exact too
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

    name = "sign"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        block: int = 256,
        majority_vote: bool = False,
        **options: Unpack[CompressionOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`.
            block: elements that share a magnitude; see `compression.Sign`.
            majority_vote: True if gradients become signs.
            **options: as for `CompressedAllReduce`; but for a vote, `exact` and `min_numel` are `LARGE_MATRICES`.

        Raises:
            ValueError: a vote with error feedback, which it has none of, or with `only_if_faster`; or as for
                `CompressedAllReduce`.
        """
        self.majority_vote = majority_vote
        if majority_vote:
            if options.get("only_if_faster"):
                raise ValueError(
                    "a vote's gradients are signs, for which learning rates are others than for the means of steps without "
                    "compression: leave out only_if_faster, or majority_vote"
                )
            if options.get("error_feedback") or options.get("owner_feedback"):
                raise ValueError("a majority vote has no error feedback: leave out majority_vote, or the feedback")
            # A rank without a gradient would have to abstain, for which there is no sign.
            self.weighable = False
            self.refuses_tiers = "a majority vote counts the signs of all ranks, not of their means on nodes"
            given: CompressionOptions = {**options, "error_feedback": False, "owner_feedback": False}
        else:
            given = {**LARGE_MATRICES, **options}
        super().__init__(module, optimizer, codec=compression.Sign(block), **given)

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        """See `GradientAlgorithm.exchange_for`."""
        kind = MajorityVote if self.majority_vote else CompressedExchange
        return kind(bucket, communicator, self.policy, self.feedback)


class MajorityVote(CompressedExchange):
    """Averages signs, and takes the signs of that."""

    # A rank without a gradient votes too, but what no rank has a gradient for is no vote.
    has_memory = False
    # A result is larger than any gradient: all ranks would vote for it again.
    needs_increments = True

    @torch.no_grad()
    def run(self, step: int) -> Iterator[Work]:
        """See `Exchange.run`."""
        votes = self.codec(step) is not None
        if votes:
            _to_signs(self.bucket.flat)
        yield from super().run(step)
        if votes:
            _to_signs(self.bucket.flat)


def _to_signs(x: torch.Tensor) -> None:
    """Replaces each element by +1 or -1; what is not finite stays, for others to see."""
    x.copy_(torch.where(x.isfinite(), torch.where(x < 0, x.new_tensor(-1.0), x.new_tensor(1.0)), x))
