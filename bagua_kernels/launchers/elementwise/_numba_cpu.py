"""Maps a rule over flat arrays on the CPU, a slice of every array a task."""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from bagua_kernels.jit._numba_cpu import LOAD, STORE, array, compile_template, run_parallel, runs_alone
from bagua_kernels.jit.source import function_from_source
from bagua_kernels.launchers.elementwise import call_lines
from bagua_kernels.rules.optimizers import ElementwiseRule

TASK = 16384


def source(rule: ElementwiseRule, scalars: int) -> str:
    """The text of a serial and a parallel kernel for this number of arguments.

    Arrays are sliced before the loop, which spares it negative-index checks and lets it vectorise.
    """
    arrays = [f"a{i}" for i in range(rule.arrays)]
    arguments = ", ".join(arrays + [f"s{i}" for i in range(scalars)])
    lines = [f"def over_range({arguments}, begin, end):"]
    lines += [f"    {a} = {a}[begin:end]" for a in arrays]
    lines += ["    for i in range(a0.size):"]
    lines += [f"        v{i} = load_{i}(a{i}[i])" for i in range(rule.arrays)]
    lines += [f"        {call_lines(rule, scalars)}"]
    lines += [f"        a{i}[i] = store_{i}(r{i})" for i in rule.writes]
    lines += [
        f"def over_tasks({arguments}, n, task):",
        "    for t in numba.prange((n + task - 1) // task):",
        f"        serial({arguments}, t * task, min((t + 1) * task, n))",
    ]
    return "\n".join(lines) + "\n"


@functools.cache
def kernels(rule: ElementwiseRule, scalars: int, dtypes: tuple[torch.dtype, ...]) -> tuple[Any, Any]:
    """The serial and the parallel kernel."""
    text = source(rule, scalars)
    literal = np.float64 if dtypes[0] == torch.float64 else np.float32
    bindings: dict[str, Any] = {"rule": rule.function}
    for i, dtype in enumerate(dtypes):
        bindings |= {f"load_{i}": LOAD[dtype], f"store_{i}": STORE[dtype]}
    over_range = function_from_source(text, "over_range", {"__name__": __name__}, __file__)
    over_tasks = function_from_source(text, "over_tasks", {"__name__": __name__, "numba": numba}, __file__)
    serial = compile_template(over_range, bindings, literal=literal)
    return serial, compile_template(over_tasks, {"serial": serial}, parallel=True)


def apply(rule: ElementwiseRule, arrays: tuple[torch.Tensor, ...], scalars: tuple[float, ...]) -> None:
    """See `bagua_kernels.launchers.elementwise.apply`."""
    serial, parallel = kernels(rule, len(scalars), tuple(a.dtype for a in arrays))
    real = np.float64 if arrays[0].dtype == torch.float64 else np.float32
    arguments = [*map(array, arrays), *map(real, scalars)]
    n = arrays[0].numel()
    if runs_alone(n):
        serial(*arguments, 0, n)
    else:
        run_parallel(parallel, *arguments, n, TASK)
