"""Checks of the kernels of GPUs, most of which run without a GPU."""
