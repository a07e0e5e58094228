"""The AdamW rule beside a copy and beside PyTorch's own optimizers."""

from __future__ import annotations

import torch

from bench.workloads import groups as workloads


def pytest_generate_tests(metafunc):
    groups = workloads.elementwise_groups(torch.device("cpu"), metafunc.config.option.adamw_elements)
    metafunc.parametrize("row", [row for rows in groups for row in rows], ids=lambda row: row.answer)


def test_elementwise(benchmark, row, request):
    workloads.run_benchmark(benchmark, row, request.config.option.adamw_elements, request.config.option.rounds)
