"""Reference implementation of gossip's passes over memory, in NumPy and from the formulas of the papers.

Each operation is one NumPy operation on float32, rounded once, in the order that `bagua_kernels.rules.gossip` documents.
"""

from collections.abc import Sequence

import numpy as np

from tests.oracles.block_quantizers import Counts, decode, encode
from tests.oracles.block_rules import BOOL, Spec
from tests.oracles.minmax_uint8 import F32, U8


def own(spec: Spec, n: int, counts: Counts | None) -> BOOL:
    """Returns which elements belong to their block."""
    if counts is None:
        return np.ones(n, dtype=bool)
    places = np.arange(n)
    return places % spec.block < np.array(counts)[places // spec.block]


def choco(
    spec: Spec, x: F32, replica: F32, factor: float, seed: int = 0, counts: Counts | None = None
) -> tuple[U8, F32]:
    """Returns the payload of factor (x - replica), and the replica moved by what it decodes to."""
    with np.errstate(all="ignore"):
        payload = encode(spec, (x - replica) * np.float32(factor), seed, counts=counts)
        moved = replica + decode(spec, payload, x.size)
    return payload, np.where(own(spec, x.size, counts), moved, replica)


def dcd(spec: Spec, x: F32, replica: F32, total: F32, seed: int = 0, counts: Counts | None = None) -> tuple[U8, F32]:
    """Returns the payload of total + x - 2 replica, and the replica moved by what it decodes to, which is the new x."""
    with np.errstate(all="ignore"):
        payload = encode(spec, (total + x) - np.float32(2) * replica, seed, counts=counts)
        moved = replica + decode(spec, payload, x.size)
    return payload, np.where(own(spec, x.size, counts), moved, replica)


def weighted_sum(terms: Sequence[F32], weights: Sequence[float] | None, scale: float = 1.0) -> F32:
    """Returns `scale` times the sum of each term times its weight: from the left, each operation rounded.

    If all weights are one divided by the number of terms, the sum is divided by that number instead.
    """
    total = np.zeros_like(terms[0])
    mean = weights is not None and all(weight == 1 / len(terms) for weight in weights)
    with np.errstate(all="ignore"):
        for place, term in enumerate(terms):
            total = total + (term if weights is None or mean else term * np.float32(weights[place]))
        return (total / np.float32(len(terms)) if mean else total) * np.float32(scale)
