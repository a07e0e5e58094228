"""Benchmarks: `make bench` for pytest-benchmark's tables, `python -m bench.speed` for one interleaved comparison."""
