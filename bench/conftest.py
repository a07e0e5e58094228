"""`pytest bench`: what kernels take beside a copy and beside PyTorch, as tables that fit a terminal.

By default vectors are small enough for three minutes in all, compilation included. `--full` takes those of a real model;
`--codec-elements 300000 --adamw-elements 300000 --rounds 3` sets everything, as for `python -m bench.speed`.
"""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from bench import suite_table
from bench.workloads import groups as workloads

_QUICK = {"codec_elements": 4_000_000, "adamw_elements": 4_000_000, "rounds": 5}
_FULL = {"codec_elements": workloads.CODEC_ELEMENTS, "adamw_elements": workloads.ADAMW_ELEMENTS, "rounds": 15}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bagua_kernels")
    group.addoption("--full", action="store_true", help=f"measure with {_FULL} instead of {_QUICK}")
    for name in _QUICK:
        group.addoption(f"--{name.replace('_', '-')}", type=int, help="overrides the size that --full decides about")


def pytest_configure(config: pytest.Config) -> None:
    for name, value in (_FULL if config.option.full else _QUICK).items():
        if getattr(config.option, name) is None:
            setattr(config.option, name, value)
        elif getattr(config.option, name) < 1:
            raise pytest.UsageError(f"--{name.replace('_', '-')} must be 1 or more")
    # The project's own options keep benchmarks off among tests; pytest-benchmark reads this after the hooks of conftest files.
    if "--benchmark-disable" not in config.invocation_params.args:
        config.option.benchmark_disable = False
        config.option.benchmark_quiet = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(0))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    benchmarks = [one for one in config._benchmarksession.benchmarks if one]  # type: ignore[attr-defined]
    terminalreporter.ensure_newline()
    console = Console(file=terminalreporter._tw._file, width=terminalreporter._tw.fullwidth)
    for table in suite_table.tables(benchmarks):
        console.print(table)
