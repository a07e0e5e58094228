"""What every algorithm reaches: `python -m bench.convergence`."""
