"""Rows of the algorithms with local steps: four ranks that meet once in 30 steps, with AdamW inside."""

from __future__ import annotations

from typing import Any

import torch

from bagua_kernels import algorithms, optim
from bench.convergence.row import TEXT, Row

INTERVAL = 30
DILOCO = "DiLoCo"
# Chosen on seed 0, for 50 rounds. A larger momentum looks back over too many. With 0.7 and 0.8 the loss was 2.5 % higher, with
# the defaults 0.7 and 0.9 it was 8 % higher.
OUTER: dict[str, Any] = {"interval": INTERVAL, "outer_lr": 0.9, "outer_momentum": 0.7}
# An eighth of the elements: of the default 1.6 % a rank would have sent each less than once.
SPARSE = "chunked_topk:k=64,chunk=512"


def muon(model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    """Muon for the hidden matrices, AdamW at the task's learning rate for the rest; neither decays weights, as in other rows.

    Of 8 and 20 times that rate, the former was better on seed 0: 1.21 and 1.33.
    """
    return optim.muon_with_adamw(model, lr=8 * rate, weight_decay=0.0, adamw_lr=rate, adamw_weight_decay=0.0)


ROWS = [
    Row(DILOCO, algorithms.DiLoCo, OUTER, tasks=TEXT, most=1.05),
    # The same without an outer optimizer: DiLoCo has to be better.
    Row("plain averaging", algorithms.LocalSGD, {"interval": INTERVAL}, baseline=DILOCO, tasks=TEXT, least=1.0),
    Row(
        "DiLoCo, 4 bits", algorithms.DiLoCo, {**OUTER, "codec": "absmax_int4"}, baseline=DILOCO, tasks=TEXT, most=1.005
    ),
    Row(
        "SparseLoCo",
        algorithms.SparseLoCo,
        {"interval": INTERVAL, "codec": SPARSE},
        baseline=DILOCO,
        tasks=TEXT,
        most=1.02,
    ),
    # Another optimizer inside, which is to pay in spite of the rounds.
    Row("MuLoCo", algorithms.MuLoCo, OUTER, baseline=DILOCO, tasks=TEXT, most=1.0, optimizer=muon),
]
