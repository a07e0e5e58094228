"""Rows of the algorithms with local steps: four ranks that meet once in 30 steps, with AdamW inside."""

from __future__ import annotations

from typing import Any

from bagua_kernels import algorithms
from bench.convergence.row import TEXT, Row

INTERVAL = 30
DILOCO = "DiLoCo"
OUTER: dict[str, Any] = {"interval": INTERVAL}
ROWS = [
    Row(DILOCO, algorithms.DiLoCo, OUTER, tasks=TEXT, most=1.05),
    # The same without an outer optimizer: DiLoCo has to be better.
    Row("plain averaging", algorithms.LocalSGD, {"interval": INTERVAL}, baseline=DILOCO, tasks=TEXT, least=1.0),
    Row(
        "DiLoCo, 4 bits", algorithms.DiLoCo, {**OUTER, "codec": "absmax_int4"}, baseline=DILOCO, tasks=TEXT, most=1.005
    ),
    Row("SparseLoCo", algorithms.SparseLoCo, {"interval": INTERVAL}, baseline=DILOCO, tasks=TEXT, most=1.02),
]
