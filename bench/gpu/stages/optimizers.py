"""Tests of optimizers on CUDA tensors, and tests of launchers with Triton."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from bench.gpu.stage import Context
from bench.gpu.tests_of import run_tests, verdict
from bench.gpu.workers import cores


def run(context: Context) -> None:
    """Runs both sets of tests, each with most of the cores."""
    jobs = min(12, cores())
    results: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        reports = {name: Path(folder) / f"{name}.xml" for name in ("optimizers", "launchers")}
        if context.on_gpu:
            results["optimizers"] = run_tests(
                "optimizers",
                ["tests/optim/test_cuda.py"],
                0.5 * context.left,
                reports["optimizers"],
                jobs=jobs,
                timeout=40,
            )
        tests = ["tests/launchers"] if context.on_gpu else ["tests/launchers/test_elementwise.py"]
        chosen = ["-k", "triton-cuda" if context.on_gpu else "test_sgd and triton-cpu"]
        results["launchers"] = run_tests(
            "launchers",
            tests,
            context.left - 3.0,
            reports["launchers"],
            jobs=jobs if context.on_gpu else 1,
            timeout=40,
            more=chosen,
        )
    verdict(results)
