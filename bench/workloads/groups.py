"""What is measured: all rows in groups, each group one question. Used by every benchmark here."""

from __future__ import annotations

import torch

from bench.workloads import codecs as workloads_codecs
from bench.workloads import elementwise as workloads_elementwise
from bench.workloads import fused as workloads_fused
from bench.workloads import outer as workloads_outer
from bench.workloads.rows import Workload as Workload
from bench.workloads.rows import run_benchmark as run_benchmark

BLOCK = 256
CODEC_ELEMENTS = 25_000_000
ADAMW_ELEMENTS = 16_777_216


def codec_groups(device: torch.device, n: int = CODEC_ELEMENTS) -> list[list[Workload]]:
    return [
        *workloads_codecs.groups(n, device),
        *workloads_fused.groups(n, device),
        *workloads_codecs.sparse_groups(n, device),
        *workloads_outer.groups(n, device),
    ]


def elementwise_groups(device: torch.device, n: int = ADAMW_ELEMENTS) -> list[list[Workload]]:
    return workloads_elementwise.groups(n, device)
