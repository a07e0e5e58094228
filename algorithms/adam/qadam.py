"""QAdam: momentum as one byte per element, once Adam's second moment is known."""

from __future__ import annotations

from types import MappingProxyType
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

    Options and their defaults, all by keyword::

        freeze_step=100           the steps before v is frozen, 15 to 25 % of training and those in which the learning
                                  rate rises; "auto" to find out, see `FrozenAdam`; BAGUA's `warmup_steps`
        block=256                 elements that share a range; see `compression.MinMaxUInt8`
        stochastic=False          round at random instead of to nearest
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
        error_feedback=False      True if each rank keeps what its payloads lack; by default if the codec is biased
        owner_feedback=None       True if the owners of chunks do; by default as `error_feedback`
        groups=None               other codecs for parameters whose names match a pattern: `{"*.embedding.*": "topk"}`
        exact=()                  patterns of names of parameters to average without compression; "1d" for all biases
                                  and norms
        min_numel=0               parameters with fewer elements are exact too
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

    name = "qadam"
    # BAGUA's.
    synonyms = MappingProxyType({"warmup_steps": "freeze_step"})

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
