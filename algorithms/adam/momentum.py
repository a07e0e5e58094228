"""Averages momentum instead of gradients, once Adam's second moment is known: what QAdam and 1-bit Adam have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from bagua_kernels.algorithms.adam.frozen_adam import Correction, FrozenAdam
from bagua_kernels.algorithms.compressed import CompressedAllReduce
from bagua_kernels.bucket import Bucket
from bagua_kernels.compression import Codec

_PIECE = 1 << 15  # elements


class MomentumAllReduce(CompressedAllReduce):
    """Averages gradients up to the freeze of an Adam's second moment, and its momentum from then on.

    For each bucket of gradients, in the order in which backward completes them:

    1. Until the optimizer has frozen v, average it without compression.
    2. From then on, let every rank's momentum go on with its own gradient: m_i = beta1 m + (1 - beta1) g_i.
    3. Average m_i as `CompressedAllReduce` averages gradients; multiply by the mask, which is 0 where v is 0; bring it
       to `limit * (sqrt(v) + eps)` at most, since what the payloads lack is in proportion to a block, and v may be
       tiny.
    4. Give the optimizer the gradient that leads from m to that average: g = (average - beta1 m) / (1 - beta1). If no
       rank used a parameter, Adam skips it: add average - beta1 m to what payloads lack, since it is still to come.

    m is what the optimizer has applied so far, in its state, and has the same bits on all ranks. So nothing drifts
    apart when a gradient is accumulated over several backward passes, clipped, or skipped. Also, only
    `optimizer.step()` freezes v, between backward passes and after the same step on all ranks: all see a pass the same
    way.

    The optimizer is part of it: take steps with `optimizer`. As long as another one does, nothing freezes. Parameters
    that travel exactly are averaged as gradients in both phases. What has had no gradient up to the freeze is not
    trained later. After it, clip by `clip_grad_norm_` of this object: the norm of `grad` alone is mostly that of what
    payloads lack.

    On one rank nothing is sent, so v never freezes: plain Adam. A state that was frozen on more ranks stays frozen.

    Attributes:
        optimizer: Adam, with decoupled weight decay.
        mask: see the constructor.
        limit: see the constructor.
        scaler: see the constructor.
    """

    # Without a gradient on any rank Adam skips a parameter, whatever its momentum.
    late = False

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: None = None,
        *,
        freeze_step: int | Literal["auto"],
        params: Any = None,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        v_correction: Correction = "continued",
        mask: bool | Mapping[str, Tensor] = True,
        limit: float = 100.0,
        scaler: torch.amp.GradScaler | None = None,
        **arguments: Any,
    ) -> None:
        """Wraps a module and makes its optimizer; collective over all ranks. All arguments are equal on all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: None: it is made here.
            freeze_step: the steps before v is frozen, 15 to 25 % of training and those in which the learning rate
                rises; "auto" to find out, see `FrozenAdam`.
            params: of the module, as groups with options of their own if need be; all of them if None.
            lr: as for `FrozenAdam`.
            betas: as for `FrozenAdam`; those of a parameter's group are its own.
            eps: as for `FrozenAdam`.
            weight_decay: as for `FrozenAdam`.
            v_correction: what becomes of v's bias correction when v freezes; see `FrozenAdam`.
            mask: True stops momentum where v is 0 at the freeze: codecs do not keep zeros, and there any update is
                divided by eps. Or masks of parameters by name, of their shapes, for more. False refuses to go on if v
                is 0 anywhere.
            limit: learning rates by which an element may move in a step after the freeze, about; infinite as in the
                papers. Adam itself stays below 8 with its default betas, whatever the gradients.
            scaler: that by which losses are scaled, if any; read in backward, so update it after the optimizer's step.
            **arguments: as for `CompressedAllReduce`.

        Raises:
            TypeError: an optimizer is given, `warmup_steps`, or `apply_in_backward`.
            ValueError: the optimizer lacks a trainable parameter, a mask does not fit, or as for `FrozenAdam` and
                `CompressedAllReduce`.
        """
        kind = type(self).__name__
        if optimizer is not None:
            raise TypeError(
                f"{kind} makes its optimizer itself, got {type(optimizer).__name__}: leave it out, pass lr, betas and "
                "so on, and call step() on the attribute `optimizer`"
            )
        if "warmup_steps" in arguments:
            raise TypeError(f"{kind} has no warmup_steps: freeze_step says when compression begins")
        if arguments.get("apply_in_backward"):
            raise TypeError(
                f"{kind} needs all of its optimizer's step to be after backward: leave out apply_in_backward"
            )
        self.optimizer = FrozenAdam(
            list(module.parameters()) if params is None else params,
            lr,
            betas,
            eps,
            weight_decay,
            freeze_step=freeze_step,
            v_correction=v_correction,
        )
        # Groups by number: loading a state replaces the groups.
        numbers = {p: number for number, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for name, p in trained.items():
            if p not in numbers:
                raise ValueError(f"parameter {name!r} of shape {tuple(p.shape)} is in no group of params: add it")
        if not limit > 0:
            raise ValueError(f"limit must be above 0, got {limit}")
        self.mask, self.limit = mask, limit
        for name, given in mask.items() if isinstance(mask, Mapping) else ():
            if name not in trained or given.shape != trained[name].shape:
                wanted = tuple(trained[name].shape) if name in trained else f"one of {sorted(trained)}"
                raise ValueError(f"the mask of {name!r} has shape {tuple(given.shape)}, expected {wanted}")
        self.scaler = scaler
        self._members = {name: (p, numbers[p]) for name, p in trained.items()}
        self._checked: set[str] = set()
        self._sends_momentum: dict[int, bool] = {}  # by bucket
        super().__init__(module, self.optimizer, **arguments)
        communicator = self._communicator
        if communicator.size == 1:
            self.optimizer.freeze_step = None
            return
        self.optimizer.knows_scale = scaler is not None
        # Sums of the same numbers may differ in their last bits between machines.
        self.optimizer.agree = lambda stable: bool(communicator.broadcast_object(stable))

    @property
    def holds_back(self) -> str:
        """Nothing: what payloads lack is momentum, which is not squared; see `Algorithm.holds_back`."""
        return ""

    def codec_at(self, bucket: Bucket, step: int) -> Codec | None:
        """What encodes a bucket in a step; None if nothing does."""
        return super().codec_at(bucket, step) if self.optimizer.frozen else None

    @torch.no_grad()
    def exchange(self, bucket: Bucket, step: int) -> None:
        """See `Algorithm.exchange`."""
        if not self.optimizer.frozen:
            super().exchange(bucket, step)
            return
        self._sends_momentum[bucket.index] = sends_momentum = self.codec_at(bucket, step) is not None
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        moments = [_Moments(self.optimizer, *self._members[name]) for name in bucket.names]
        sends = [sends_momentum and bucket.compressed(slot) for slot in range(len(moments))]
        parts = list(zip(bucket.names, bucket.views, moments, sends, strict=True))
        for _, view, of, sent in parts:
            if sent:
                of.go_on(view, 1 / scale)
        super().exchange(bucket, step)
        for name, view, of, sent in parts:
            if of.m is None or of.v is None:
                view.mul_(0.0)
                continue
            stopped = self._stopped(name, of.v)
            for x, m, v, still in pieces(view, of.m, of.v, stopped):
                # A gradient within these bounds keeps momentum within them.
                most = v.float().sqrt().add_(of.eps).mul_(self.limit if sent else self.limit * scale)
                most.masked_fill_(still, 0.0)
                # What is not finite becomes NaN, for others to see: infinity times 0 is.
                bounded = x.clamp(-most, most).add_(x, alpha=0)
                x.copy_(bounded.sub_(m, alpha=of.beta).mul_(scale / (1 - of.beta)) if sent else bounded)

    @torch.no_grad()
    def settle(self, step: int, seconds: float) -> None:
        """See `Algorithm.settle`; gives residuals back what was sent of parameters that no rank used."""
        assert self._engine is not None
        unused = self._engine.unused() if self.optimizer.frozen else set()
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        # What is frozen was withheld.
        unused = {position for position in unused if not self._engine.is_frozen(position)}
        for bucket, slot in (self._engine.slots[position] for position in sorted(unused)):
            span, found = bucket.spans[slot], self._all_reduces.get(bucket.index)
            worker = None if found is None else found.residuals().get("worker")
            if not bucket.compressed(slot):
                continue
            of = _Moments(self.optimizer, *self._members[bucket.names[slot]])
            # Equal on all ranks, as is its mean; what is not finite is not kept.
            moved = bucket.flat[span].float().mul_((1 - of.beta) / scale).nan_to_num_(0.0, 0.0, 0.0)
            if worker is not None:
                worker.add(span.start, moved)
            elif found is None and moved.any():  # sent without compression: residuals that were handed over
                zeros = torch.zeros_like(bucket.flat, dtype=torch.float32)
                kept = self._recalled.setdefault(bucket.index, {"worker": zeros})
                kept["worker"][span] += moved
        super().settle(step, seconds)

    def _hand_over(self, bucket: Bucket, vectors: Mapping[str, Tensor], kept: set[str]) -> None:
        """Residuals are of momentum; where gradients follow uncompressed, they become what moves momentum as much."""
        if self.optimizer.frozen and not self._sends_momentum[bucket.index]:
            scale = 1.0 if self.scaler is None else self.scaler.get_scale()
            vectors = {key: vector.clone() for key, vector in vectors.items()}
            for name, span in zip(bucket.names, bucket.spans, strict=True):
                of = _Moments(self.optimizer, *self._members[name])
                for vector in vectors.values():
                    vector[span].mul_(scale / (1 - of.beta))
        super()._hand_over(bucket, vectors, kept)

    def close(self) -> None:
        """See `Algorithm.close`; from then on the optimizer is Adam, as it has come to be."""
        self.optimizer.freeze_step, self.optimizer.knows_scale, self.optimizer.agree = None, True, bool
        super().close()

    def _stopped(self, name: str, v: Tensor) -> Tensor:
        """Which elements of a parameter have no momentum.

        Raises:
            ValueError: a mask lets elements have it whose v is 0.
        """
        own = self.mask if isinstance(self.mask, bool) else self.mask.get(name, True)
        still = v <= 0
        if own is True:
            return still
        stopped = torch.zeros_like(still) if own is False else own.to(v.device) == 0
        if name not in self._checked:
            if wrong := int((still & ~stopped).sum()):
                raise ValueError(
                    f"{wrong} of the {v.numel()} elements of parameter {name!r} had no gradient up to the freeze, so v "
                    "is 0 there, and what a codec makes of a momentum of 0 would be divided by eps: leave mask=True, "
                    "or mask them"
                )
            self._checked.add(name)
        return stopped

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As `Algorithm.clip_grad_norm_`; after the freeze as `FrozenAdam.clip_grad_norm_`.

        Raises:
            ValueError: the norm of momenta is asked for with another type than 2.
        """
        if not self.optimizer.frozen:
            return super().clip_grad_norm_(max_norm, norm_type)
        if norm_type != 2.0:
            raise ValueError(f"after the freeze only Euclidean norms are bounded, got {norm_type=}")
        return self.optimizer.clip_grad_norm_(max_norm)

    @contextlib.contextmanager
    def join(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Refused on several ranks: one that is through would not know of the others' momentum and freeze.

        Raises:
            ValueError: always, on several ranks.
        """
        if self._communicator.size > 1:
            raise ValueError(
                f"{type(self).__name__} cannot go on with ranks whose optimizer has stopped; give all ranks the same "
                "number of batches, the surplus ones with weigh(0.0)"
            )
        with super().join(optimizer):
            yield


class _Moments:
    """What an optimizer knows of a parameter.

    Attributes:
        m: its momentum; None as long as it had no gradient.
        v: its frozen second moment, likewise.
        beta: decay of m.
        eps: added to the root of v.
    """

    def __init__(self, optimizer: FrozenAdam, parameter: Tensor, group: int) -> None:
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
