"""Averages momentum instead of gradients, once Adam's second moment is known: what QAdam and 1-bit Adam have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from bagua_kernels.algorithms.adam.frozen_adam import Correction, FrozenAdam
from bagua_kernels.algorithms.compressed import CompressedAllReduce, EncodingOptions
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.momentum import Momenta, MomentumExchange
from bagua_kernels.algorithms.gradient_algorithm import SizeOptions
from bagua_kernels.algorithms.policy.schedule import Encoding
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator
from bagua_kernels.comm.mailbox.courier import weakly
from bagua_kernels.options import FloatOrInf


class WholeStepOptions(EncodingOptions, SizeOptions, total=False):
    """Keyword arguments of algorithms with codecs, where all of the optimizer's step is after backward."""


class MomentumOptions(WholeStepOptions, total=False):
    """Keyword arguments of `MomentumAllReduce` beside its codec and when it freezes."""

    params: Any
    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    v_correction: Correction
    mask: bool | Mapping[str, Tensor]
    limit: float
    scaler: torch.amp.GradScaler | None


class MomentumAllReduce(CompressedAllReduce):
    """Averages gradients up to the freeze of an Adam's second moment, and its momentum from then on.

    For each bucket of gradients, in the order in which backward completes them:

    1. Until the optimizer has frozen v, average it without compression.
    2. From then on, let every rank's momentum go on with its own gradient: m_i = beta1 m + (1 - beta1) g_i.
    3. Average m_i as `CompressedAllReduce` averages gradients. Multiply by the mask, which is 0 where v is 0. Clamp to
       `limit * (sqrt(v) + eps)`, because the error of a payload is in proportion to a block, and v may be tiny.
    4. Give the optimizer the gradient that leads from m to that average: g = (average - beta1 m) / (1 - beta1). If no
       rank used a parameter, Adam skips it: add average - beta1 m to its residual.

    m is the optimizer's state and has the same bits on all ranks. So replicas stay equal when a gradient is accumulated
    over several backward passes, clipped, or skipped. Also, only `optimizer.step()` freezes v, between backward passes
    and after the same step on all ranks: a pass is the same on all ranks.

    The optimizer is part of the algorithm: take steps with `optimizer`. While another optimizer takes them, nothing
    freezes. Parameters that are averaged exactly are averaged as gradients in both phases. A parameter without a
    gradient before the freeze is not trained later. After it, clip by `clip_grad_norm_` of this object: the norm of
    `grad` alone is mostly the error of the payloads.

    On one rank nothing is sent, so v never freezes: plain Adam. A state that was frozen on more ranks stays frozen.

    Attributes:
        optimizer: Adam, with decoupled weight decay.
        mask: see the constructor.
        limit: see the constructor.
        scaler: see the constructor.
    """

    has_hook = False
    sends_gradients = False
    # What a new member sends goes on from the common momentum, which it needs exactly.
    takes_drafts = supplies = False
    optimizer: FrozenAdam

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
        limit: FloatOrInf = 100.0,
        scaler: torch.amp.GradScaler | None = None,
        codec: Encoding = "minmax_uint8",
        **options: Unpack[WholeStepOptions],
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
            codec: as for `CompressedAllReduce`.
            **options: as for `CompressedAllReduce`.

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
        if "warmup_steps" in options:
            raise TypeError(f"{kind} has no warmup_steps: freeze_step is the step with which compression begins")
        if options.get("apply_in_backward"):
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
        groups = {name: (p, numbers[p]) for name, p in trained.items()}
        self._momenta = Momenta(self.optimizer, groups, mask, limit, scaler)
        super().__init__(module, self.optimizer, codec=codec, **options)
        self.scaler = scaler  # not before: momenta are kept without the scale, and residuals with them
        self._freeze_step = freeze_step
        if self.communicator.size == 1:
            # Where others join, it may freeze after the first pass with them.
            self.optimizer.freeze_step = None
        if self.communicator.size == 1 and self.members is None:
            return
        self.optimizer.knows_scale, self.optimizer.ranks = scaler is not None, self.communicator.size
        self.optimizer.agree = weakly(self._agreed)

    def _pass_ended(self) -> None:
        """Notes how many ranks have the gradients of this pass, which ended among them, though fewer may be left by now."""
        super()._pass_ended()
        if self._engine is not None:
            self.optimizer.ranks, self.optimizer.freeze_step = self._engine.participation.ranks, self._freeze_step

    def _agreed(self, stable: bool) -> bool:
        """Returns rank 0's answer: sums of the same numbers may differ in their last bits between machines."""
        return bool(self._completed(lambda: self.communicator.broadcast_object(stable)))

    def exchange_for(self, bucket: Bucket, communicator: Communicator) -> Exchange:
        """See `GradientAlgorithm.exchange_for`."""
        return MomentumExchange(bucket, communicator, self.policy, self.feedback, self._momenta)

    def close(self) -> None:
        """See `Algorithm.close`; from then on the optimizer is Adam, as it has come to be."""
        self.optimizer.freeze_step, self.optimizer.knows_scale, self.optimizer.agree = None, True, bool
        super().close()

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
        if self.communicator.size > 1:
            raise ValueError(
                f"{type(self).__name__} cannot go on with ranks whose optimizer has stopped; give all ranks the same "
                "number of batches, the surplus ones with weigh(0.0)"
            )
        with super().join(optimizer):
            yield
