"""MinMaxUInt8 beside a copy of the same vector and beside plain PyTorch operations."""

from __future__ import annotations

import pytest
import torch

from bench import workloads

ROWS = [row for rows in workloads.codec_groups(torch.device("cpu")) for row in rows]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.group}-{row.name}")
def test_codec(benchmark, row):
    workloads.run_benchmark(benchmark, row)
