"""Error feedback of one element (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019)."""

from __future__ import annotations

from bagua_kernels.rules import vocabulary as tl
from bagua_kernels.rules.rounding import float_bits


def compensated(x, residual):
    """What is to be sent: the value and what earlier payloads lacked."""
    return x + residual


def remainder(total, decoded, residual):
    """What the payload lacks; the old residual where that is not finite, so that one bad step does not spoil all later ones.

    0 where neither is: a residual that has become infinite would spoil all steps.
    """
    lacking = total - decoded
    kept = tl.where((float_bits(residual) & 0x7FFFFFFF) < 0x7F800000, residual, 0.0)
    return tl.where((float_bits(lacking) & 0x7FFFFFFF) < 0x7F800000, lacking, kept)
