"""Maps a rule over flat arrays on the CPU, a slice of every array a thread."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit._numba_cpu import LOAD, STORE, array, compile_template
from bagua_kernels.jit._numba_cpu_sharing import shared
from bagua_kernels.jit._numba_cpu_threads import run_all
from bagua_kernels.jit.source import function_from_source
from bagua_kernels.launchers.elementwise import call_lines
from bagua_kernels.rules.optimizers import ElementwiseRule

# Elements of a piece. Threads begin at cache lines, and where vectors do.
PIECE = 64


def source(rule: ElementwiseRule, scalars: int) -> str:
    """The text of the kernel for this number of arguments.

    Arrays are sliced before the loop, which spares it negative-index checks and lets it vectorise.
    """
    arrays = [f"a{i}" for i in range(rule.arrays)]
    arguments = ", ".join(arrays + [f"s{i}" for i in range(scalars)])
    lines = [f"def over_range({arguments}, begin, end, threads, launcher):"]
    lines += ["    if shared(begin, end, threads, launcher):", "        return"]
    lines += [f"    {a} = {a}[begin * {PIECE} : end * {PIECE}]" for a in arrays]
    lines += ["    for i in range(a0.size):"]
    lines += [f"        v{i} = load_{i}(a{i}[i])" for i in range(rule.arrays)]
    lines += [f"        {call_lines(rule, scalars)}"]
    lines += [f"        a{i}[i] = store_{i}(r{i})" for i in rule.writes]
    return "\n".join(lines) + "\n"


@functools.cache
def kernel(rule: ElementwiseRule, scalars: int, dtypes: tuple[torch.dtype, ...]) -> Any:
    """The kernel over a range of pieces."""
    text = source(rule, scalars)
    literal = np.float64 if dtypes[0] == torch.float64 else np.float32
    bindings: dict[str, Any] = {"rule": rule.function, "shared": shared}
    for i, dtype in enumerate(dtypes):
        bindings |= {f"load_{i}": LOAD[dtype], f"store_{i}": STORE[dtype]}
    over_range = function_from_source(text, "over_range", {"__name__": __name__}, __file__)
    return compile_template(over_range, bindings, literal=literal)


def apply(rule: ElementwiseRule, arrays: tuple[torch.Tensor, ...], scalars: tuple[float, ...]) -> None:
    """See `bagua_kernels.launchers.elementwise.apply`."""
    compiled = kernel(rule, len(scalars), tuple(a.dtype for a in arrays))
    real = np.float64 if arrays[0].dtype == torch.float64 else np.float32
    n = arrays[0].numel()
    run_all(compiled, (*map(array, arrays), *map(real, scalars)), -(-n // PIECE), n)
