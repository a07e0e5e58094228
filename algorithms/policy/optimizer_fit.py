"""A warning where an optimizer with a second moment meets gradients that arrive late."""

from __future__ import annotations

import re

import torch

from bagua_kernels.caller_warnings import warn_caller
from bagua_kernels.compression import Cast, Codec, Contractive
from bagua_kernels.compression.block import BlockCodec

# With AdamW 4 bits per element train almost as exact means do, 2 and 1 do not (bench/results/convergence.json). Of other codecs,
# sparsifiers above all, this part of a gradient's squared norm is to be in a payload.
_BITS, _PART = 4, 0.4
# Adam, AdamW, NAdam, RAdam, Adamax, SparseAdam, FusedAdam, Adam8bit, …; LAMB divides by the same root.
_NAMES = re.compile(r"adam|lamb", re.IGNORECASE)
_STATES = {"exp_avg_sq", "exp_inf"}


class OptimizerFitWarning(UserWarning):
    """An algorithm and an optimizer were combined that are known to train worse than either does with others."""


def divides_by_second_moment(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer is an Adam or a relative: by its class, a base class, or its state.

    Wrappers of optimizers, such as `ZeroRedundancyOptimizer`, are judged by what they wrap.
    """
    inner = [getattr(optimizer, name, None) for name in ("optim", "optimizer")]
    return (
        any(_NAMES.search(kind.__name__) for kind in type(optimizer).__mro__)
        or any(not _STATES.isdisjoint(state) for state in optimizer.state.values())
        or any(isinstance(one, torch.optim.Optimizer) and divides_by_second_moment(one) for one in inner)
    )


def holds_back(codec: Codec) -> bool:
    """True if Adam trains worse with a codec's payloads, because of what they lack of a gradient.

    With error feedback it comes late, without it never, or as noise if the codec is unbiased.
    """
    if isinstance(codec, Cast):  # whose worst case are subnormals
        return False
    if isinstance(codec, BlockCodec):
        return codec.rule.bits < _BITS
    kept = codec.bias.delta if isinstance(codec.bias, Contractive) else 1 / (1 + codec.bias.omega)
    return kept < _PART


def warn_of_adam(name: str, what: str, optimizer: torch.optim.Optimizer | None) -> None:
    """Warns, at the line outside of this package that led here, if an algorithm and an optimizer do not go together.

    Args:
        name: of the algorithm's class.
        what: its payloads that lack most of a gradient; empty if none do.
        optimizer: the one that its constructor was given, if any.
    """
    if not what or optimizer is None or not divides_by_second_moment(optimizer):
        return
    warn_caller(
        f"{name} sends {what}: what they lack of a gradient comes late, or as noise, and {type(optimizer).__name__} divides "
        "by a second moment, which does not forgive that: expect a higher loss than with exact means. OneBitAdam and QAdam send "
        "Adam's momentum instead, and 8 bits (ByteGrad) go with any optimizer; with this algorithm warmup_steps "
        "(start_step of PowerSGD), a larger ratio or a higher rank help in part. docs/algorithms/README.md has figures",
        OptimizerFitWarning,
    )
