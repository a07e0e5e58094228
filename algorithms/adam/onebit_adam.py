"""1-bit Adam: momentum as signs, once Adam's second moment is known."""

from __future__ import annotations

from typing import Literal, Unpack

import torch

from bagua_kernels import compression
from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce, MomentumOptions
from bagua_kernels.algorithms.compressed import LARGE_MATRICES
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

    Options and their defaults, all by keyword::

        freeze_step='auto'        the steps before v is frozen, 15 to 25 % of training and those in which the learning
                                  rate rises; "auto" to find out, see `FrozenAdam`
        block=256                 elements that share a magnitude; see `compression.Sign`
        params=None               of the module, as groups with options of their own if need be; all of them if None
        lr=0.001                  the learning rate
        betas=(0.9, 0.999)        decay of m and of v; those of a parameter's group are its own
        eps=1e-08                 added to the root of v
        weight_decay=0.0          decoupled, before and after the freeze
        v_correction='continued'  what becomes of v's bias correction when v freezes; see `FrozenAdam`
        mask=True                 True stops momentum where v is 0 at the freeze: codecs do not keep zeros, and there
                                  any update is divided by eps
        limit=100.0               learning rates by which an element may move in a step after the freeze, about;
                                  infinite as in the papers
        scaler=None               that by which losses are scaled, if any; read in backward, so update it after the
                                  optimizer's step
        error_feedback=True       True if each rank keeps what its payloads lack; by default if the codec is biased
        owner_feedback=True       True if the owners of chunks do; by default as `error_feedback`
        groups=None               other codecs for parameters whose names match a pattern: `{"*.embedding.*": "topk"}`
        exact='1d'                patterns of names of parameters to average without compression; "1d" for all biases
                                  and norms
        min_numel=512             parameters with fewer elements are exact too
        seed=0                    of random numbers
        guard=None                measures now and then how much is lost; `stats().errors` has the results
        only_if_faster=False      True to measure in 36 steps if compression is faster than none, by turns of four steps
                                  with it and four without
        bucket_bytes=10485760     gradients are exchanged in buckets of about this size; the first ones may be smaller
        in_flight=None            buckets that are exchanged at a time, each on a thread and connections of its own; by
                                  default 2 on CPUs, 1 on GPUs
        communicator=None         the ranks that train together; those of `comm.init()` if None, which is called if it
                                  has not been
        hierarchical=None         True to average inside nodes in full precision first, and then between them; False for
                                  never; None where nodes have several ranks
        nodes=None                which ranks share a node, such as `[[0, 1], [2, 3]]`; found by the hosts if None
        broadcast_buffers=True    True to begin each forward pass in training mode with rank 0's buffers on all ranks
        average_buffers=False     a pattern of names, as of `fnmatch`, or several
        verify_every=None         steps from one comparison of what all ranks have alike to the next; None for none
        on_failure='raise'        "raise", or "heal": when ranks are lost, those that are left go on without an error
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
