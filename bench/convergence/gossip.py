"""Rows of the algorithms that exchange parameters with neighbours: eight ranks on a ring, with two ways to deal examples."""

from __future__ import annotations

from bagua_kernels import algorithms
from bagua_kernels.errors import DivergenceError
from bench.convergence.row import RING, Row

BY_LABEL = "all-reduce, by label"
# alpha^2 = E|C(z) - z|^2 / |z|^2 is about 2 on this task: see `noise` of its rows.
LOUD = "qsgd:bits=4,norm=l2,block=1024"
ROWS = [
    Row(BY_LABEL, algorithms.GradientAllReduce, baseline=BY_LABEL, tasks=RING, by_label=True),
    Row("D-PSGD", algorithms.Decentralized, {"peers": "ring"}, tasks=RING, most=1.05),
    # What unequal data cost, without which the row of D2 would show nothing.
    Row(
        "D-PSGD, by label",
        algorithms.Decentralized,
        {"peers": "ring"},
        baseline=BY_LABEL,
        tasks=RING,
        by_label=True,
        least=1.25,
    ),
    Row("D2, by label", algorithms.D2, {"peers": "lazy_ring"}, baseline=BY_LABEL, tasks=RING, by_label=True, most=1.08),
    *(
        Row(
            f"DCD, {bits} bits",
            algorithms.LowPrecisionDecentralized,
            {"codec": f"minmax_uint{bits}:stochastic=true"},
            tasks=RING,
            most=1.08,
        )
        for bits in (8, 4, 2)
    ),
    Row("Choco, 2 bits", algorithms.Choco, {"codec": "minmax_uint2:stochastic=true"}, tasks=RING, most=1.08),
    Row("Choco, loud codec", algorithms.Choco, {"codec": LOUD}, tasks=RING, most=1.12),
    Row(
        "DCD, loud codec",
        algorithms.LowPrecisionDecentralized,
        {"codec": LOUD},
        tasks=RING,
        raises=DivergenceError,
    ),
]
