"""Training steps on emulated hosts: `python -m bench.training`, and of two commits `python -m bench.training.commits`."""
