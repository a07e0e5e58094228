"""Scalar arithmetic, and nothing else: each function computes one element or one block's constants.

A rule is plain Python in the vocabulary of `triton.language`, written once. Called directly, on NumPy scalars or arrays,
it is its own reference; `bagua_kernels.jit.rule` compiles it for Triton, Numba-CUDA and Numba on the CPU. A rule may call
other rules; it reads no global but `tl` and other rules, and every constant is a literal.
"""
