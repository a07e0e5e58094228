"""How momentum is averaged instead of gradients, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bagua_kernels.algorithms.exchanges.compressed import CompressedExchange, Feedback
from bagua_kernels.algorithms.policy.policy import Policy
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Work
from bagua_kernels.compression import Codec

_PIECE = 1 << 15  # elements


class MomentumExchange(CompressedExchange):
    """Averages a bucket of gradients up to the freeze, and of momenta from then on; see `MomentumAllReduce`."""

    # Without a gradient on any rank Adam skips a parameter, whatever its momentum.
    has_memory = False

    def __init__(
        self, bucket: Bucket, communicator: Communicator, policy: Policy, feedback: Feedback, momenta: Momenta
    ) -> None:
        """As `CompressedExchange`, with what the optimizer knows of parameters."""
        super().__init__(bucket, communicator, policy, feedback)
        self.momenta = momenta
        self._sends_momentum = False

    def codec(self, step: int) -> Codec | None:
        """See `CompressedExchange.codec`."""
        return super().codec(step) if self.momenta.optimizer.frozen else None

    @torch.no_grad()
    def run(self, step: int) -> Iterator[Work]:
        """See `Exchange.run`."""
        if not self.momenta.optimizer.frozen:
            yield from super().run(step)
            return
        bucket, scale, limit = self.bucket, self.momenta.scale(step), self.momenta.limit
        self._sends_momentum = self.codec(step) is not None
        moments = [self.momenta.of(name) for name in bucket.names]
        sends = [self._sends_momentum and bucket.compressed(slot) for slot in range(len(moments))]
        parts = list(zip(bucket.names, bucket.views, moments, sends, strict=True))
        for _, view, of, sent in parts:
            if sent:
                of.go_on(view, 1 / scale)
        yield from super().run(step)
        for name, view, of, sent in parts:
            if of.m is None or of.v is None:
                view.mul_(0.0)
                continue
            stopped = self.momenta.stopped(name, of.v)
            for x, m, v, still in pieces(view, of.m, of.v, stopped):
                # A gradient within these bounds keeps momentum within them.
                most = v.float().sqrt().add_(of.eps).mul_(limit if sent else limit * scale)
                most.masked_fill_(still, 0.0)
                # What is not finite becomes NaN, for others to see: infinity times 0 is.
                bounded = x.clamp(-most, most).add_(x, alpha=0)
                x.copy_(bounded.sub_(m, alpha=of.beta).mul_(scale / (1 - of.beta)) if sent else bounded)

    @torch.no_grad()
    def end_step(self, unused: Sequence[int]) -> None:
        """Gives residuals back what was sent of parameters that no rank used; see `Exchange.end_step`."""
        super().end_step(unused)
        self.momenta.end_step()
        if not self.momenta.optimizer.frozen or not unused:
            return
        scale = self.momenta.scale()
        for slot in unused:
            if not self.bucket.compressed(slot):
                continue
            span, of = self.bucket.spans[slot], self.momenta.of(self.bucket.names[slot])
            # Equal on all ranks, as is its mean; what is not finite is not kept.
            moved = self.bucket.flat[span].float().mul_((1 - of.beta) / scale).nan_to_num_(0.0, 0.0, 0.0)
            self.add_to_worker_residual(span.start, moved)

    def hand_over(self, vectors: Mapping[str, Tensor], kept: set[str]) -> None:
        """Residuals are of momentum; where gradients follow uncompressed, they become what moves momentum as much."""
        if self.momenta.optimizer.frozen and not self._sends_momentum:
            scale = self.momenta.scale()
            vectors = {key: vector.clone() for key, vector in vectors.items()}
            for name, span in zip(self.bucket.names, self.bucket.spans, strict=True):
                of = self.momenta.of(name)
                for vector in vectors.values():
                    vector[span].mul_(scale / (1 - of.beta))
        super().hand_over(vectors, kept)


class Freezing(Protocol):
    """An Adam whose second moment freezes, such as `FrozenAdam`: what exchanges read of it."""

    param_groups: list[dict[str, Any]]

    @property
    def frozen(self) -> bool:
        """True if the second moment stays as it is."""

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """Momentum and second moment of each parameter."""


class Momenta:
    """What exchanges need to know of the optimizer.

    Attributes:
        optimizer: whose momentum is averaged.
        limit: see `MomentumAllReduce`.
    """

    def __init__(
        self,
        optimizer: Freezing,
        groups: Mapping[str, tuple[Tensor, int]],
        mask: bool | Mapping[str, Tensor],
        limit: float,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        """Prepares for parameters, given with the numbers of their groups, since loading a state replaces groups."""
        self.optimizer, self.limit = optimizer, limit
        self._groups, self._mask, self._scaler = groups, mask, scaler
        self._checked: set[str] = set()
        self._scale: tuple[int, float] | None = None

    def of(self, name: str) -> Moments:
        """What the optimizer knows of a parameter."""
        return Moments(self.optimizer, *self._groups[name])

    def end_step(self) -> None:
        """Forgets the loss scale of the step: a checkpoint may go back to the same step with another one."""
        self._scale = None

    def scale(self, step: int | None = None) -> float:
        """Returns by what the losses of a step are scaled; by what they are now if None."""
        if self._scaler is None:
            return 1.0
        if step is None:
            # waits: only for residuals that are handed over, and for parameters that no rank has used.
            return self._scaler.get_scale()
        known = self._scale
        if known is None or known[0] != step:
            # waits: once a step, on a communication thread.
            known = self._scale = step, self._scaler.get_scale()
        return known[1]

    def stopped(self, name: str, v: Tensor) -> Tensor:
        """Which elements of a parameter have no momentum.

        Raises:
            ValueError: a mask lets elements have it whose v is 0.
        """
        own = self._mask if isinstance(self._mask, bool) else self._mask.get(name, True)
        still = v <= 0
        if own is True:
            return still
        # waits: once for each parameter's mask.
        stopped = torch.zeros_like(still) if own is False else own.to(v.device) == 0
        if name not in self._checked:
            # waits: once for each parameter.
            if wrong := int((still & ~stopped).sum()):
                raise ValueError(
                    f"{wrong} of the {v.numel()} elements of parameter {name!r} had no gradient up to the freeze, so v "
                    "is 0 there, and what a codec makes of a momentum of 0 would be divided by eps: leave mask=True, "
                    "or mask them"
                )
            self._checked.add(name)
        return stopped


class Moments:
    """What an optimizer knows of a parameter.

    Attributes:
        m: its momentum; None as long as it had no gradient.
        v: its frozen second moment, likewise.
        beta: decay of m.
        eps: added to the root of v.
    """

    def __init__(self, optimizer: Freezing, parameter: Tensor, group: int) -> None:
        state, options = optimizer.state.get(parameter, {}), optimizer.param_groups[group]
        self.m: Tensor | None = state.get("exp_avg")
        self.v: Tensor | None = state.get("exp_avg_sq")
        self.beta, self.eps = float(options["betas"][0]), float(options["eps"])

    def go_on(self, g: Tensor, factor: float) -> None:
        """Replaces a gradient, after it has been multiplied by a factor, by the momentum that it leads to."""
        m = g.float().mul_((1 - self.beta) * factor)
        if self.m is not None:
            m.add_(self.m, alpha=self.beta)
        if m.dtype != g.dtype:
            g.copy_(m)


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cuts tensors of one shape alike, into pieces whose intermediate results stay in a CPU's cache."""
    first = tensors[0]
    if first.is_cuda or first.numel() <= _PIECE:
        yield tensors
        return
    rows = max(1, _PIECE * first.shape[0] // first.numel())
    yield from zip(*(tensor.split(rows) for tensor in tensors), strict=True)
