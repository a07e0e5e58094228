"""Codecs and their fused paths beside a copy of the same vector and beside PyTorch."""

from __future__ import annotations

import torch

from bench.workloads import groups as workloads


def pytest_generate_tests(metafunc):
    groups = workloads.codec_groups(torch.device("cpu"), metafunc.config.option.codec_elements)
    rows = [row for rows in groups for row in rows]
    metafunc.parametrize("row", rows, ids=lambda row: f"{row.group}-{row.answer}")


def test_codec(benchmark, row, request):
    workloads.run_benchmark(benchmark, row, request.config.option.codec_elements, request.config.option.rounds)
