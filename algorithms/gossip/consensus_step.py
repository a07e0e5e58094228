"""The consensus step of Choco that brings ranks together fastest, by a simulation."""

from __future__ import annotations

import math

import torch

from bagua_kernels.comm.topology import Topology
from bagua_kernels.compression import BlockCodec, Codec, Unbiased, fold_seed

# From the largest on: the first of equals counts. Each is about 1.4 times the next.
CANDIDATES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.17, 0.12, 0.08, 0.05, 0.03, 0.02, 0.01)
_ELEMENTS = 256
_ROUNDS = 60
_LOOK = 10  # rounds from one look at the distance to the next; divides `_ROUNDS`
_TOO_FAR = 1e3  # times the first distance from the mean: the candidate diverges


def tuned(codec: Codec, topology: Topology) -> float:
    """Returns the step after which vectors of normal numbers are nearest to their mean.

    All ranks are simulated: `_ROUNDS` rounds of Choco without gradients for each candidate.
    """
    remaining = {eta: _distance_after(codec, topology, eta) for eta in CANDIDATES}
    return min(remaining, key=lambda eta: remaining[eta])


def _distance_after(codec: Codec, topology: Topology, eta: float) -> float:
    generator = torch.Generator().manual_seed(0)
    elements = -(-_ELEMENTS // codec.block) * codec.block
    x = torch.randn(topology.size, elements, generator=generator, dtype=torch.float32)
    w = torch.tensor(topology.matrix(), dtype=torch.float32)
    factor = 1 / (1 + codec.bias.omega) if isinstance(codec.bias, Unbiased) else 1.0
    own, decoded = torch.zeros_like(x), torch.empty_like(x)
    distance = first = float((x - x.mean(0)).norm())
    for turn in range(_ROUNDS):
        difference = (x - own) * factor
        # One call for all ranks costs as much as for one; blocks do not know to whom they belong.
        together = isinstance(codec, BlockCodec)
        parts = (
            zip([difference.view(-1)], [decoded.view(-1)], strict=True)
            if together
            else zip(difference, decoded, strict=True)
        )
        for number, (part, to) in enumerate(parts):
            codec.decode(codec.encode(part, seed=fold_seed(0, turn, 0, number)), to)
        own += decoded
        x += eta * (w @ own - own)
        if turn % _LOOK == _LOOK - 1:
            distance = float((x - x.mean(0)).norm())
            if not distance < _TOO_FAR * first:
                return math.inf
    return distance
