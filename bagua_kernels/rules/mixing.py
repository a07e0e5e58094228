"""One element of a gossip step: a weighted sum of the values of some ranks, in ascending order of the ranks.

Products and sums are rounded one by one. A plain mean has weights of 1 and the number of ranks as its divisor. 1/3 rounded to
float32 is too large: a model would grow by 3e-8 in every step. A sum with other weights has the divisor 1.
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


def corrected(flow, correction, x):
    """The new correction, and the parameter less that."""
    new = correction - flow
    return new, x - new


def flow_1(b, own, correction, x, wb, divisor):
    """What flows from one neighbour changes the correction; see `D2`."""
    return corrected(tl.div_rn((b - own) * wb, divisor), correction, x)


def flow_2(b, c, own, correction, x, wb, wc, divisor):
    """As above, from two neighbours."""
    return corrected(tl.div_rn((b - own) * wb + (c - own) * wc, divisor), correction, x)


def flow_3(b, c, d, own, correction, x, wb, wc, wd, divisor):
    """As above, from three neighbours."""
    return corrected(tl.div_rn((b - own) * wb + (c - own) * wc + (d - own) * wd, divisor), correction, x)


def flow_4(b, c, d, e, own, correction, x, wb, wc, wd, we, divisor):
    """As above, from four neighbours."""
    flow = (b - own) * wb + (c - own) * wc + (d - own) * wd + (e - own) * we
    return corrected(tl.div_rn(flow, divisor), correction, x)


MOST = 5  # ranks that a rule of this file adds up
_MIXED: dict[int, Callable[..., Any]] = {2: mixed_2, 3: mixed_3, 4: mixed_4, 5: mixed_5}
_FLOWS: dict[int, Callable[..., Any]] = {1: flow_1, 2: flow_2, 3: flow_3, 4: flow_4}


@functools.cache
def mixed(terms: int, own: int) -> ElementwiseRule:
    """Returns the rule that replaces the array of number `own` by the weighted sum of all; 2 to `MOST` arrays."""
    return ElementwiseRule(f"mixed_{terms}_{own}", _MIXED[terms], terms, (own,))


@functools.cache
def flows(neighbours: int) -> ElementwiseRule:
    """Returns the rule of the neighbours' values, the own one, its correction, and the parameters; 1 to `MOST` - 1 neighbours."""
    return ElementwiseRule(f"flow_{neighbours}", _FLOWS[neighbours], neighbours + 3, (neighbours + 1, neighbours + 2))
