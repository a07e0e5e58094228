"""Deep Gradient Compression: sparse gradients whose momentum is kept where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.compressed import LARGE_MATRICES, CompressedAllReduce, CompressionOptions
from bagua_kernels.algorithms.exchanges.compressed import CompressedExchange, Feedback
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.vectors import Named, euclidean_norm, gather, scatter
from bagua_kernels.algorithms.policy.policy import Policy
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Work
from bagua_kernels.quotient import divided


@dataclass(frozen=True)
class Correction:
    """How momentum is kept where elements wait to be sent; see `DGC`.

    Attributes:
        momentum: m.
        nesterov: True if it is Nesterov's.
        masking: True if it stops where elements were sent.
        clip: the norm to which gradients are clipped before; None does not clip.
    """

    momentum: float
    nesterov: bool
    masking: bool
    clip: float | None


@register
class DGC(CompressedAllReduce):
    """Top-k with momentum correction (Lin et al., "Deep Gradient Compression", ICLR 2018, sections 3.1 to 3.3).

    For each bucket of gradients g, with this rank's velocity u and residual v, which start at zero:

    1. Clip each tensor's gradient to a norm of `clip / sqrt(ranks)`, if asked to.
    2. Momentum correction: u = m u + g; v = v + u. With Nesterov's: u = m (u + g); v = v + u + g.
    3. Send the `ratio` of elements of v that are largest in magnitude; everyone adds up everyone's.
    4. Set v to zero where it was sent; with `masking` (momentum factor masking, section 3.3) u too, since it is stale there.

    Tensors that are exact are averaged as they are, and get their momentum then. What arrives already contains the momentum, so
    the optimizer is SGD without; sparse gradients of embeddings get none. In the first steps the ratio falls from a
    quarter (`warmup`), because early gradients change fast. The paper masks and sends 0.1 %, over trainings in which
    each element is sent many times. At higher ratios masking undoes momentum, and training is slower than dense SGD's.

    Options and their defaults, all by keyword::

        ratio=0.01               of elements that are sent
        momentum=0.9             m, 0 or more and below 1
        nesterov=False           see step 2
        masking=False            see step 4
        clip=None                see step 1; of gradients without a scale, if `scaler` is given
        warmup=(0.25, 0.0625, 0.015625)
                                 the ratios before `ratio`
        warmup_every=0           steps that each of these lasts, an epoch's in the paper; 0 leaves them out
        error_feedback=True      True if each rank keeps what its payloads lack; by default if the codec is biased
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

    name = "dgc"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        ratio: float = 0.01,
        momentum: float = 0.9,
        nesterov: bool = False,
        masking: bool = False,
        clip: float | None = None,
        warmup: Sequence[float] = (0.25, 0.0625, 0.015625),
        warmup_every: int = 0,
        **options: Unpack[CompressionOptions],
    ) -> None:
        """Wraps a module; collective over all ranks. All arguments are equal on all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: as for `Algorithm`; SGD without momentum.
            ratio: of elements that are sent.
            momentum: m, 0 or more and below 1.
            nesterov: see step 2.
            masking: see step 4.
            clip: see step 1; of gradients without a scale, if `scaler` is given.
            warmup: the ratios before `ratio`.
            warmup_every: steps that each of these lasts, an epoch's in the paper; 0 leaves them out.
            **options: as for `CompressedAllReduce`; `exact` and `min_numel` are `LARGE_MATRICES`.

        Raises:
            ValueError: a number is out of its range, the optimizer has momentum, or as for `CompressedAllReduce`.
        """
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be 0 or more and below 1, got {momentum}")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip must be above 0, or None, got {clip}")
        if warmup_every < 0:
            raise ValueError(f"warmup_every must be 0 or more, got {warmup_every}")
        if options.get("error_feedback") is False:
            raise ValueError("DGC is error feedback: error_feedback=False makes no sense of it, take TopK")
        if optimizer is not None and any(group.get("momentum") for group in optimizer.param_groups):
            raise ValueError("DGC keeps the momentum itself: make the optimizer with momentum=0")
        if masking:
            self.refuses_tiers = "with masking a rank's momentum stops where its own payload had an element"
        self.correction = Correction(momentum, nesterov, masking, clip)
        start = options.get("warmup_steps", 0)
        ratios = [*(warmup if warmup_every else ()), ratio]
        codec = {(start + i * warmup_every if i else 0): compression.TopK(r) for i, r in enumerate(ratios)}
        given: CompressionOptions = {**LARGE_MATRICES, **options, "error_feedback": True}
        super().__init__(module, optimizer, codec=codec, **given)

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        """See `GradientAlgorithm.exchange_for`."""
        return MomentumCorrection(bucket, communicator, self.policy, self.feedback, self.correction)


class MomentumCorrection(CompressedExchange):
    """Sends the largest elements of what momentum and the residual make of a gradient."""

    # What is sent has momentum already, and would get it again.
    needs_increments = True

    def __init__(
        self, bucket: Bucket, communicator: Communicator, policy: Policy, feedback: Feedback, correction: Correction
    ) -> None:
        """As `CompressedExchange`, with a velocity of zero."""
        super().__init__(bucket, communicator, policy, feedback)
        self.correction = correction
        self._velocity = gather(bucket, {}, exact=True)

    @torch.no_grad()
    def run(self, step: int) -> Iterator[Work]:
        """See `Exchange.run`."""
        bucket, velocity, codec = self.bucket, self._velocity, self.codec(step)
        n = bucket.flat.numel()
        if self.correction.clip is not None:
            most = self.correction.clip * self.loss_scale / self.communicator.size**0.5
            for view in bucket.views:
                view.mul_((most / euclidean_norm(view)).clamp(max=1.0))
        exact = bucket.whole[n : bucket.whole.numel() - bucket.flags.numel()]
        frozen = [(bucket.spans[slot], velocity[bucket.spans[slot]].clone()) for slot in bucket.frozen]
        self._move(velocity[:n], bucket.flat)
        for slot in bucket.frozen:
            if bucket.compressed(slot):
                bucket.flat[bucket.spans[slot]] = 0.0
        before = None if codec is None or not self.correction.masking else self.worker_residual(codec) + bucket.flat
        yield from super().run(step)
        # These were averaged without memory, so that momentum may as well come afterwards.
        self._move(velocity[n:], exact)
        if codec is not None and before is not None:
            sent = (before != 0) & (self.worker_residual(codec) == 0)
            velocity[:n].masked_fill_(sent, 0.0)
        for span, before_step in frozen:
            velocity[span] = before_step

    def _move(self, u: torch.Tensor, g: torch.Tensor) -> None:
        """Momentum correction: updates the velocity, and replaces the gradient by what it moves parameters by."""
        # What is not finite goes to everyone and is not kept: it would stay in the velocity for ever.
        m, nesterov = self.correction.momentum, self.correction.nesterov
        moved = (u + g).mul_(m) if nesterov else (u * m).add_(g)
        finite = moved.isfinite()
        g.copy_(torch.where(finite, moved + g, moved) if nesterov else moved)
        torch.where(finite, moved, u, out=u)

    def rescale(self, factor: float) -> None:
        """See `Exchange.rescale`."""
        super().rescale(factor)
        self._velocity.mul_(factor)

    def state(self) -> dict[str, Named]:
        """The residuals, and the velocity; see `Exchange.state`."""
        return {**super().state(), "velocity": scatter(self.bucket, divided(self._velocity, self.loss_scale))}

    def load(self, state: Mapping[str, Named]) -> None:
        """See `Exchange.load`."""
        super().load(state)
        self._velocity = gather(self.bucket, state.get("velocity", {}), exact=True)
