"""The algorithms that are simulated, each with its simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn

from bagua_kernels.algorithms import (
    DGC,
    QSGD,
    Algorithm,
    ByteGrad,
    CompressedAllReduce,
    DoubleSqueeze,
    FP8AllReduce,
    GradientAllReduce,
    NaturalCompression,
    OneBitSGD,
    PowerSGD,
    RandomK,
    SignSGD,
    TernGrad,
    TopK,
)
from tests.algorithms.training import Wrap, everything, tuner
from tests.grids import grid, one_of_each
from tests.oracles import algorithms as oracle
from tests.oracles.algorithms import Shapes
from tests.oracles.block_rules import Spec
from tests.oracles.payloads import Block, Drawn, Largest, Ternary, Whole, block

Simulate = Callable[[Shapes, int], oracle.Algorithm]


@dataclass(frozen=True)
class Row:
    """An algorithm with its options, and what simulates it.

    Attributes:
        wrap: The class.
        simulate: Of shapes and a number of ranks.
        options: Of the class.
        tolerance: Relative to a tensor's largest gradient; 0 where all bits must be equal.
        remembers: Whether all that goes in comes out, or is remembered.
    """

    wrap: Wrap
    simulate: Simulate
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0
    remembers: bool = False

    def make(self, module: nn.Module, **arguments: Any) -> Algorithm:
        return self.wrap(module, **{**everything(self.wrap), **self.options, **arguments})


def compressed(code: Any, **arguments: Any) -> Simulate:
    return lambda shapes, ranks: oracle.Compressed(shapes, ranks, code, **arguments)


def dgc(ratios: Mapping[int, float], **arguments: Any) -> Simulate:
    return lambda shapes, ranks: oracle.DGC(shapes, ranks, ratios, **arguments)


def powersgd(rank: int, **arguments: Any) -> Simulate:
    return lambda shapes, ranks: oracle.PowerSGD(shapes, ranks, rank, **arguments)


def minmax(bits: int = 8, *, stochastic: bool = False) -> Block:
    return block(Spec("minmax", 64, bits=bits, stochastic=stochastic))


def qsgd(bits: int, norm: Any = "max") -> Block:
    return block(Spec("absmax", 32, bits=bits, stochastic=True, norm=norm))


def fp8(form: Any = "e4m3", *, stochastic: bool = False) -> Block:
    return block(Spec("fp8", 32, format=form, stochastic=stochastic))


SIGN, TWO_MEANS = block(Spec("sign", 64)), block(Spec("sign", 64, means=2))

TERNARY = block(Spec("absmax", 64, levels=1, bits=2, stochastic=True))

PLAIN = 1e-6

FACTORS = 2e-5

WITHOUT_MEMORY = {
    "allreduce": Row(GradientAllReduce, oracle.Algorithm, {}, PLAIN),
    # Exact means, until it has measured.
    "auto": Row(tuner, oracle.Algorithm, {}, PLAIN),
    "bytegrad": Row(ByteGrad, compressed(minmax(), feedback=False), {"block": 64}),
    "bytegrad_stochastic": Row(ByteGrad, compressed(minmax(stochastic=True)), {"block": 64, "stochastic": True}),
    "qsgd": Row(QSGD, compressed(qsgd(4), seed=5), {"block": 32, "seed": 5}),
    "qsgd_2_bits": Row(QSGD, compressed(qsgd(2), each=True), {"bits": 2, "block": 32, "bucket_bytes": 1}),
    "qsgd_8_bits_l2": Row(QSGD, compressed(qsgd(8, "l2")), {"bits": 8, "block": 32, "norm": "l2"}),
    "terngrad": Row(TernGrad, compressed(TERNARY), {"block": 64, "clip": None}),
    "terngrad_clip": Row(
        TernGrad, lambda shapes, ranks: oracle.Clipped(shapes, ranks, TERNARY, 1.5), {"block": 64, "clip": 1.5}, PLAIN
    ),
    "terngrad_shared": Row(TernGrad, compressed(Ternary(block=64)), {"block": 64, "clip": None, "shared": True}, PLAIN),
    "terngrad_shared_clip": Row(
        TernGrad,
        lambda shapes, ranks: oracle.Clipped(shapes, ranks, Ternary(block=64), 2.5),
        {"block": 64, "shared": True},
        PLAIN,
    ),
    "majority": Row(SignSGD, oracle.Vote, {"block": 64, "majority_vote": True}),
    "natural": Row(NaturalCompression, compressed(block(Spec("natural", 64))), {"block": 64}),
    "fp8": Row(FP8AllReduce, compressed(fp8(), feedback=False), {"block": 32}),
    "fp8_e5m2_stochastic": Row(
        FP8AllReduce, compressed(fp8("e5m2", stochastic=True)), {"format": "e5m2", "block": 32, "stochastic": True}
    ),
    "identity": Row(CompressedAllReduce, compressed(Whole()), {"codec": "identity"}, PLAIN),
}

WITH_MEMORY = {
    "bytegrad_feedback": Row(
        ByteGrad, compressed(minmax(), feedback=True), {"block": 64, "error_feedback": True}, 0, True
    ),
    "fp8_feedback": Row(FP8AllReduce, compressed(fp8(), feedback=True), {"block": 32, "error_feedback": True}, 0, True),
    "two_magnitudes": Row(
        CompressedAllReduce, compressed(block(Spec("magnitudes", 64))), {"codec": "two_magnitudes:block=64"}, 0, True
    ),
    "sign": Row(SignSGD, compressed(SIGN), {"block": 64}, 0, True),
    "sign_buckets": Row(SignSGD, compressed(SIGN, each=True), {"block": 64, "bucket_bytes": 1}, 0, True),
    "onebit": Row(OneBitSGD, compressed(TWO_MEANS, warmup=2), {"block": 64, "warmup_steps": 2}, PLAIN, True),
    "double_squeeze": Row(DoubleSqueeze, compressed(SIGN), {"codec": "sign:block=64"}, 0, True),
    "double_squeeze_qsgd": Row(
        DoubleSqueeze, compressed(qsgd(2), feedback=True), {"codec": "qsgd:bits=2,block=32"}, 0, True
    ),
    "double_squeeze_natural": Row(
        DoubleSqueeze,
        compressed(block(Spec("natural", 64)), feedback=True, seed=3),
        {"codec": "natural:block=64", "seed": 3},
        0,
        True,
    ),
    "topk": Row(TopK, compressed(Largest(ratio=0.1)), {"ratio": 0.1}, 0, True),
    "topk_buckets": Row(TopK, compressed(Largest(ratio=0.1), each=True), {"ratio": 0.1, "bucket_bytes": 1}, 0, True),
    "randomk": Row(RandomK, compressed(Drawn(ratio=0.1), seed=9), {"ratio": 0.1, "seed": 9}, PLAIN, True),
    "int4": Row(
        CompressedAllReduce,
        compressed(block(Spec("absmax", 64, bits=4))),
        {"codec": "absmax_int4:block=64"},
        0,
        True,
    ),
    "schedule": Row(
        CompressedAllReduce,
        compressed({0: minmax(), 2: None, 3: SIGN, 4: fp8()}, warmup=1),
        {
            "codec": {0: "minmax_uint8:block=64", 2: None, 3: "sign:block=64", 4: "fp8:block=32"},
            "warmup_steps": 1,
        },
        PLAIN,
        True,
    ),
    "groups": Row(
        CompressedAllReduce,
        compressed(SIGN, groups={"s*d": Largest(ratio=0.2), "first": None}, exact=("bias", "scale")),
        {"codec": "sign:block=64", "groups": {"s*d": "topk:ratio=0.2", "first": None}, "exact": "1d"},
        PLAIN,
        True,
    ),
    "groups_of_schedules": Row(
        CompressedAllReduce,
        compressed(minmax(), groups={"bias": {0: SIGN, 2: TWO_MEANS}, "sc*": qsgd(4)}),
        {
            "codec": "minmax_uint8:block=64",
            "groups": {"bias": {0: "sign:block=64", 2: "sign:block=64,two_means=true"}, "sc*": "qsgd:block=32"},
        },
    ),
}

DGC_ROWS = {
    "dgc": Row(DGC, dgc({0: 0.05}), {"ratio": 0.05, "masking": True}, PLAIN),
    "dgc_nesterov": Row(DGC, dgc({0: 0.1}, nesterov=True), {"ratio": 0.1, "nesterov": True, "masking": True}, PLAIN),
    "dgc_unmasked": Row(
        DGC,
        dgc({0: 0.1}, masking=False, momentum=0.5, each=True),
        {"ratio": 0.1, "masking": False, "momentum": 0.5, "bucket_bytes": 1},
        PLAIN,
    ),
    "dgc_clip": Row(DGC, dgc({0: 0.1}, clip=0.2), {"ratio": 0.1, "clip": 0.2, "masking": True}, PLAIN),
    "dgc_warmup": Row(
        DGC,
        dgc({0: 0.25, 2: 0.1, 3: 0.02}, warmup=1),
        {"ratio": 0.02, "warmup": (0.25, 0.1), "warmup_every": 1, "warmup_steps": 1, "masking": True},
        PLAIN,
    ),
}

POWERSGD_ROWS = {
    "powersgd": Row(PowerSGD, powersgd(1), {}, FACTORS),
    "powersgd_rank_2": Row(
        PowerSGD, powersgd(2, seed=7, min_compression=1), {"rank": 2, "seed": 7, "min_compression": 1.0}, FACTORS
    ),
    "powersgd_start": Row(PowerSGD, powersgd(2, start=2), {"rank": 2, "start_step": 2, "bucket_bytes": 1}, FACTORS),
    "powersgd_cold": Row(PowerSGD, powersgd(1, warm=False, start=1), {"warm_start": False, "start_step": 1}, FACTORS),
    "powersgd_in_turn": Row(PowerSGD, powersgd(2, alternate=True), {"rank": 2, "alternate": True}, FACTORS),
}

ROWS = {**WITHOUT_MEMORY, **WITH_MEMORY, **DGC_ROWS, **POWERSGD_ROWS}

NAMED = [pytest.param(row, id=name) for name, row in ROWS.items()]

every_kind = grid(cover=1, row=one_of_each(NAMED, lambda given: given.values[0].wrap))

# Each class without and with memory, with and without several buckets, and with something that changes after some steps.
SAMPLE = one_of_each(
    NAMED,
    lambda given: (given.values[0].wrap, given.values[0].remembers),
    lambda given: (given.values[0].wrap, "bucket_bytes" in given.values[0].options),
    lambda given: (
        given.values[0].wrap,
        not {"warmup_steps", "start_step", "warmup"}.isdisjoint(given.values[0].options),
    ),
    cover=1,
)
