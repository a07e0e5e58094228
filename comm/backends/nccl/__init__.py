"""NCCL through CuPy."""
