"""1-bit Adam: momentum as signs, once Adam's second moment is known."""

from __future__ import annotations

from typing import Literal, Unpack

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce, MomentumOptions
from bagua_kernels.algorithms.compressed_all_reduce import LARGE_MATRICES
from bagua_kernels.algorithms.registry import register


@register
class OneBitAdam(MomentumAllReduce):
    """Adam whose momentum travels as signs (Tang et al., "1-bit Adam", ICML 2021, algorithm 1).

    1. Up to `freeze_step`: Adam, on gradients averaged without compression. Then v is frozen.
    2. From then on each rank adds to the common momentum its own gradient, m_i = beta1 m + (1 - beta1) g_i, and what
       its earlier payloads lacked, and sends that to the owners of chunks: signs and, for each block, the mean
       magnitude.
    3. Owners average, add what their own payloads lacked, and send signs and magnitudes to everyone.
    4. m becomes the decoded mean, the same on all ranks, but 0 where v is 0. A sign cannot be zero, and without that
       mask training diverges within about twenty steps of the freeze.
    5. p = p - lr m / (sqrt(v) + eps), with m's bias correction, v's by `v_correction`, and decoupled weight decay.

    `model = OneBitAdam(module, lr=1e-3, freeze_step=1000)`, and `model.optimizer.step()` after backward.
    See `MomentumAllReduce` for how both stay together, and `FrozenAdam` for when "auto" freezes. Under
    `torch.amp.GradScaler` pass that as `scaler`. The paper has one magnitude per chunk, this class one per block; the
    paper's v has no bias correction after the freeze (`v_correction="none"`).
    """

    name = "onebit_adam"

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: None = None,
        *,
        freeze_step: int | Literal["auto"] = "auto",
        block: int = 256,
        **options: Unpack[MomentumOptions],
    ) -> None:
        """Wraps a module and makes its optimizer; collective over all ranks.

        Args:
            module: as for `Algorithm`.
            optimizer: None: it is made here.
            freeze_step: as for `MomentumAllReduce`.
            block: elements that share a magnitude; see `compression.Sign`.
            **options: as for `MomentumAllReduce`; `exact` and `min_numel` are `LARGE_MATRICES`.
        """
        codec = compression.Sign(block)
        given: MomentumOptions = {**LARGE_MATRICES, "error_feedback": True, "owner_feedback": True, **options}
        super().__init__(module, optimizer, freeze_step=freeze_step, codec=codec, **given)
