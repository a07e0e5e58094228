"""The package that compiles Numba's CUDA kernels: everything else takes `cuda` from here, so that it can be replaced.

Numba-CUDA is in maintenance since June 2026 (numba-cuda issue 902). Its successor `numba_cuda_mlir` has the same interface, but
no simulator, and it compiles only where a driver is.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator

import numpy as np

from bagua_kernels import knobs

SIMULATED: bool = knobs.CUDA_SIMULATOR.get()


@contextlib.contextmanager
def _older_numpy() -> Iterator[None]:
    """Gives NumPy back, for the length of an import, what numba-cuda 0.26 to 0.30 names and NumPy 2.5 has no more."""
    lacks = not hasattr(np, "row_stack")
    with warnings.catch_warnings():
        # NumPy 2.5 warns of a unit that numba-cuda leaves out of a NaT; older ones warn of the name below.
        warnings.simplefilter("ignore", DeprecationWarning)
        if lacks:
            np.row_stack = np.vstack
        try:
            yield
        finally:
            if lacks:
                del np.row_stack


with _older_numpy():
    from numba import cuda as cuda

    if not SIMULATED:
        # The first compilation would import it.
        importlib.import_module("numba.cuda.np.arrayobj")
