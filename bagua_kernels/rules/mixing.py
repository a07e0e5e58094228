"""One element of a gossip step: a weighted sum of the values of some ranks, in ascending order of the ranks.

Products and sums are rounded one by one. A plain mean has weights of 1 and the number of ranks as its divisor: 1/3 rounded to
float32 is too large, and a model would grow by 3e-8 in every step. A sum with other weights has the divisor 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from bagua_kernels.rules import vocabulary as tl
from bagua_kernels.rules.optimizers import ElementwiseRule


def mixed_2(a, b, wa, wb, divisor):
    """Of two ranks."""
    return tl.div_rn(a * wa + b * wb, divisor)


def mixed_3(a, b, c, wa, wb, wc, divisor):
    """Of three ranks."""
    return tl.div_rn(a * wa + b * wb + c * wc, divisor)


def mixed_4(a, b, c, d, wa, wb, wc, wd, divisor):
    """Of four ranks."""
    return tl.div_rn(a * wa + b * wb + c * wc + d * wd, divisor)


def mixed_5(a, b, c, d, e, wa, wb, wc, wd, we, divisor):
    """Of five ranks."""
    return tl.div_rn(a * wa + b * wb + c * wc + d * wd + e * we, divisor)


def corrected_2(a, b, correction, _, wa, wb, divisor):
    """What is left of a correction once the mean of two ranks has been taken from it, and that mean."""
    new = mixed_2(a, b, wa, wb, divisor)
    return correction - new, new


def corrected_3(a, b, c, correction, _, wa, wb, wc, divisor):
    """As above, of three ranks."""
    new = mixed_3(a, b, c, wa, wb, wc, divisor)
    return correction - new, new


def corrected_4(a, b, c, d, correction, _, wa, wb, wc, wd, divisor):
    """As above, of four ranks."""
    new = mixed_4(a, b, c, d, wa, wb, wc, wd, divisor)
    return correction - new, new


def corrected_5(a, b, c, d, e, correction, _, wa, wb, wc, wd, we, divisor):
    """As above, of five ranks."""
    new = mixed_5(a, b, c, d, e, wa, wb, wc, wd, we, divisor)
    return correction - new, new


def uncorrected(x, correction, _):
    """The value itself, which takes the place of its correction, and what is left of it without the correction."""
    return x, x - correction


MOST = 5  # ranks that a rule of this file adds up
_MIXED: dict[int, Callable[..., Any]] = {2: mixed_2, 3: mixed_3, 4: mixed_4, 5: mixed_5}
_CORRECTED: dict[int, Callable[..., Any]] = {2: corrected_2, 3: corrected_3, 4: corrected_4, 5: corrected_5}
# Arrays: values, their correction, and what is sent.
UNCORRECTED = ElementwiseRule("uncorrected", uncorrected, 3, (1, 2))


@functools.cache
def mixed(terms: int, own: int) -> ElementwiseRule:
    """Returns the rule that replaces the array of number `own` by the weighted sum of all; 2 to `MOST` arrays."""
    return ElementwiseRule(f"mixed_{terms}_{own}", _MIXED[terms], terms, (own,))


@functools.cache
def corrected(terms: int) -> ElementwiseRule:
    """Returns the rule of `terms` arrays to add up, their correction, and the array that becomes the sum."""
    return ElementwiseRule(f"corrected_{terms}", _CORRECTED[terms], terms + 2, (terms, terms + 1))
