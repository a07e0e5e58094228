"""JIT-compiled kernels for communication-relaxed distributed training, on Triton and Numba."""

__version__ = "0.1.0"
