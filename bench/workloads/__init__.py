"""What is measured by the benchmarks of kernels: all rows in groups, each group one question."""
