"""The block quantizers whose oracles are tested."""

from dataclasses import replace

from hypothesis import settings

from tests import grids
from tests.grids import grid
from tests.oracles import block_quantizers as bq
from tests.oracles.block_rules import Spec
from tests.oracles.vectors import (
    F32,
)
from tests.oracles.vectors import deterministic as thorough

deterministic = settings(thorough, max_examples=50 if grids.EVERYTHING else 6)

NEAREST = {
    "minmax8": Spec("minmax", 256),
    "minmax4": Spec("minmax", 64, bits=4),
    "minmax2": Spec("minmax", 32, bits=2),
    "absmax8": Spec("absmax", 256),
    "absmax4": Spec("absmax", 128, bits=4),
    "absmax2": Spec("absmax", 32, bits=2),
    "sign": Spec("sign", 64),
    "sign_two": Spec("sign", 64, means=2),
    "magnitudes": Spec("magnitudes", 256),
    "e4m3": Spec("fp8", 128),
    "e5m2": Spec("fp8", 32, format="e5m2"),
}

DITHERED = ("minmax", "absmax", "fp8")
STOCHASTIC = {
    **{f"{name}_stochastic": replace(spec, stochastic=True) for name, spec in NEAREST.items() if spec.kind in DITHERED},
    "natural": Spec("natural", 64),
    "qsgd_l2": Spec("absmax", 128, bits=4, stochastic=True, norm="l2"),
    "qsgd_5": Spec("absmax", 128, levels=5, bits=4, stochastic=True),
    "terngrad": Spec("absmax", 512, bits=2, stochastic=True),
}

ALL = {**NEAREST, **STOCHASTIC}

nearest = grid(cover=1, spec=NEAREST)

every = grid(cover=1, spec=ALL)


def recode(spec: Spec, x: F32, seed: int = 0) -> F32:
    return bq.decode(spec, bq.encode(spec, x, seed), x.size)
