"""The AdamW rule beside a copy and beside PyTorch's own optimizers."""

from __future__ import annotations

import pytest
import torch

from bench import workloads

ROWS = [row for rows in workloads.elementwise_groups(torch.device("cpu")) for row in rows]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_elementwise(benchmark, row):
    workloads.run_benchmark(benchmark, row)
