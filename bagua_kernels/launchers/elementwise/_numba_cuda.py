"""Maps a rule over flat arrays in Numba-CUDA, with a grid-stride loop."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit._numba_cuda import LOAD, STORE, array, compile_template, launching
from bagua_kernels.jit._numba_cuda_package import cuda
from bagua_kernels.jit.source import function_from_source
from bagua_kernels.launchers.elementwise import call_lines
from bagua_kernels.rules.optimizers import ElementwiseRule

THREADS = 256
ELEMENTS = 4


def source(rule: ElementwiseRule, scalars: int) -> str:
    """The text of the kernel for this number of arguments."""
    arguments = [f"a{i}" for i in range(rule.arrays)] + [f"s{i}" for i in range(scalars)]
    lines = [f"def over_range({', '.join(arguments)}):", "    for i in range(cuda.grid(1), a0.size, cuda.gridsize(1)):"]
    lines += [f"        v{i} = load_{i}(a{i}[i])" for i in range(rule.arrays)]
    lines += [f"        {call_lines(rule, scalars)}"]
    lines += [f"        a{i}[i] = store_{i}(r{i})" for i in rule.writes]
    return "\n".join(lines) + "\n"


@functools.cache
def kernel(rule: ElementwiseRule, scalars: int, dtypes: tuple[torch.dtype, ...]) -> Any:
    """The compiled kernel."""
    bindings: dict[str, Any] = {"rule": rule.function}
    for i, dtype in enumerate(dtypes):
        bindings[f"load_{i}"] = LOAD[dtype]
        bindings[f"store_{i}"] = STORE[dtype]
    literal = np.float64 if dtypes[0] == torch.float64 else np.float32
    template = function_from_source(source(rule, scalars), "over_range", {"__name__": __name__, "cuda": cuda})
    return compile_template(template, bindings, literal=literal)


def apply(rule: ElementwiseRule, arrays: tuple[torch.Tensor, ...], scalars: tuple[float, ...]) -> None:
    """See `bagua_kernels.launchers.elementwise.apply`."""
    real = np.float64 if arrays[0].dtype == torch.float64 else np.float32
    with launching(arrays[0]) as stream:
        run = kernel(rule, len(scalars), tuple(a.dtype for a in arrays))
        grid = -(-arrays[0].numel() // (THREADS * ELEMENTS))
        run[grid, THREADS, stream](*map(array, arrays), *map(real, scalars))
