"""QAdam: momentum as one byte per element, once Adam's second moment is known."""

from __future__ import annotations

from typing import Literal, Unpack

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce, MomentumOptions
from bagua_kernels.algorithms.registry import register


@register
class QAdam(MomentumAllReduce):
    """Adam whose momentum travels in 8 bits (BAGUA, VLDB 2022; its `qadam` algorithm).

    1. Up to `freeze_step`: Adam, on gradients averaged without compression. Then v is frozen.
    2. From then on each rank adds to the common momentum its own gradient: m_i = beta1 m + (1 - beta1) g_i.
    3. Ranks average m_i as `ByteGrad` averages gradients. m becomes that, but 0 where v is 0, because a byte is hardly
       ever decoded to zero.
    4. p = p - lr m / (sqrt(v) + eps), with m's bias correction, v's by `v_correction`, and decoupled weight decay.

    `model = QAdam(module, lr=1e-3, freeze_step=100)`, and `model.optimizer.step()` after backward. See
    `MomentumAllReduce` for how both stay together. Under `torch.amp.GradScaler` pass that as `scaler`.

    BAGUA's differs in three points. It drops the gradient of the last step before the freeze, and weight decay at the
    freeze. It has one pair of betas for all groups.
    """

    name = "qadam"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: None = None,
        *,
        freeze_step: int | Literal["auto"] = 100,
        block: int = 256,
        stochastic: bool = False,
        **options: Unpack[MomentumOptions],
    ) -> None:
        """Wraps a module and makes its optimizer; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: None: it is made here.
            freeze_step: as for `MomentumAllReduce`; BAGUA's `warmup_steps`.
            block: elements that share a range; see `compression.MinMaxUInt8`.
            stochastic: round at random instead of to nearest.
            **options: as for `MomentumAllReduce`; error feedback is off unless asked for.
        """
        codec = compression.MinMaxUInt8(block, stochastic)
        given: MomentumOptions = {"error_feedback": False, **options}
        super().__init__(module, optimizer, freeze_step=freeze_step, codec=codec, **given)
