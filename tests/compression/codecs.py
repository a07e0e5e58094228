"""Every block codec and its oracle, for the tests that all of them must pass."""

from __future__ import annotations

from dataclasses import dataclass

from bagua_kernels.compression import (
    FP8,
    QSGD,
    AbsMaxInt4,
    AbsMaxInt8,
    BlockCodec,
    MinMaxUInt2,
    MinMaxUInt4,
    MinMaxUInt8,
    Natural,
    Sign,
    TernGrad,
    TwoMagnitudes,
)
from tests.grids import one_of_each, only
from tests.oracles.block_rules import Spec


@dataclass(frozen=True)
class Case:
    """A codec and what the oracle calls it."""

    codec: BlockCodec
    spec: Spec

    def __str__(self) -> str:
        return repr(self.codec).replace(" ", "")


def minmax(kind: type[MinMaxUInt8] | type[MinMaxUInt4] | type[MinMaxUInt2], bits: int, stochastic: bool) -> Case:
    return Case(kind(stochastic=stochastic), Spec("minmax", 256, bits=bits, stochastic=stochastic))


def absmax(kind: type[AbsMaxInt8] | type[AbsMaxInt4], bits: int, block: int, stochastic: bool) -> Case:
    return Case(kind(block, stochastic), Spec("absmax", block, bits=bits, stochastic=stochastic))


def qsgd(bits: int, levels: int, norm: str, block: int) -> Case:
    spec = Spec("absmax", block, levels=levels, bits=bits, stochastic=True, norm=norm)  # type: ignore[arg-type]
    return Case(QSGD(levels=levels, norm=norm, block=block), spec)


def fp8(form: str, stochastic: bool) -> Case:
    return Case(FP8(form, 128, stochastic), Spec("fp8", 128, format=form, stochastic=stochastic))  # type: ignore[arg-type]


NEAREST = [
    minmax(MinMaxUInt8, 8, False),
    minmax(MinMaxUInt4, 4, False),
    absmax(AbsMaxInt8, 8, 256, False),
    absmax(AbsMaxInt4, 4, 128, False),
    Case(Sign(), Spec("sign", 256, bits=1)),
    Case(Sign(64, two_means=True), Spec("sign", 64, bits=1, means=2)),
    fp8("e4m3", False),
    fp8("e5m2", False),
    Case(TwoMagnitudes(), Spec("magnitudes", 256)),
    Case(TwoMagnitudes(64), Spec("magnitudes", 64)),
]
STOCHASTIC = [
    minmax(MinMaxUInt8, 8, True),
    minmax(MinMaxUInt4, 4, True),
    minmax(MinMaxUInt2, 2, True),
    absmax(AbsMaxInt8, 8, 256, True),
    absmax(AbsMaxInt4, 4, 128, True),
    qsgd(2, 1, "max", 64),
    qsgd(4, 5, "max", 128),
    qsgd(8, 127, "max", 512),
    qsgd(4, 7, "l2", 128),
    qsgd(8, 55, "l2", 32),
    Case(TernGrad(), Spec("absmax", 512, levels=1, bits=2, stochastic=True)),
    Case(Natural(), Spec("natural", 256, stochastic=True)),
    fp8("e4m3", True),
    fp8("e5m2", True),
]
ALL = [*NEAREST, *STOCHASTIC]


# With those marked `beyond` that have nothing which no other has: each compiles kernels of its own.
SAMPLED = one_of_each(
    ALL,
    lambda case: type(case.codec),
    lambda case: (case.spec.kind, case.spec.norm),
    lambda case: (case.spec.bits, case.spec.format, case.spec.means),
    lambda case: case.codec.block,
    lambda case: (case.spec.kind, case.codec.stochastic),
    cover=1,
)


# For what codecs do alike, each of them in a kernel of its own: one for each kind of rule and of rounding.
_CHOSEN = one_of_each(
    [case for case in SAMPLED if isinstance(case, Case)],
    lambda case: case.spec.kind,
    lambda case: (case.codec.stochastic, case.spec.means, case.spec.norm),
    cover=1,
)
FEW = only(ALL, *(case for case in _CHOSEN if isinstance(case, Case)))
