"""Sizes of the benchmarks: `pytest bench --codec-elements 300000 --adamw-elements 300000`, as for `bench.speed`."""

from __future__ import annotations

import pytest

from bench import workloads


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--codec-elements", type=int, default=workloads.CODEC_ELEMENTS)
    parser.addoption("--adamw-elements", type=int, default=workloads.ADAMW_ELEMENTS)
