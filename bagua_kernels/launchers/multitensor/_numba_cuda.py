"""Many tensors in Numba-CUDA: one launch a tensor, since its kernels take arrays and no addresses."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit._numba_cuda import LOAD, STORE, array, compile_template, launching
from bagua_kernels.jit._numba_cuda_package import cuda
from bagua_kernels.jit.source import function_from_source
from bagua_kernels.launchers.multitensor import FACTOR, SCALARS, SKIP, Table, Variant, bindings, in_order_of_memory
from bagua_kernels.upload import uploaded

THREADS = 256
ELEMENTS = 4
# A thread adds up its own terms, and torch the threads': few enough for that not to cost.
MOST_BLOCKS_OF_SUMS = 256
HAS_FLOAT64 = True
NEEDS_TENSORS = True


def source(variant: Variant) -> str:
    """The text of the kernel."""
    columns, sums = range(len(variant.dtypes)), range(variant.rule.sums)
    lines = [
        f"def over_tensor(rows, keys, tensor, partials, {', '.join(f'a{i}' for i in columns)}):",
        f"    n = 0 if rows[tensor, {SKIP}] != 0 else a0.size",
        f"    factor = rows[tensor, {FACTOR}]",
    ]
    lines += [f"    s{i} = rows[tensor, {SCALARS + i}]" for i in range(variant.scalars)]
    if variant.width > SCALARS + variant.scalars:
        lines.append(f"    rate = rows[tensor, {SCALARS + variant.scalars}]")
    lines += [f"    total{i} = np.float64(0.0)" for i in sums]
    lines.append("    for i in range(cuda.grid(1), n, cuda.gridsize(1)):")
    if variant.stochastic:
        lines.append("        key, second_key = random_key(keys[tensor, 0], keys[tensor, 1], np.uint32(i >> 32))")
    body = variant.body(lambda c: f"a{c}[i]", lambda c, value: f"a{c}[i] = {value}", "np.uint32(i)")
    lines += [f"        {line}" for line in body]
    lines += [f"        total{i} += np.float64(term{i})" for i in sums]
    lines += [f"    partials[cuda.grid(1), {i}] = total{i}" for i in sums]
    return "\n".join(lines) + "\n"


@functools.cache
def kernel(variant: Variant) -> Any:
    """The compiled kernel."""
    literal = np.float64 if variant.double else np.float32
    template = function_from_source(source(variant), "over_tensor", {"__name__": __name__, "cuda": cuda, "np": np})
    return compile_template(template, bindings(variant, LOAD, STORE), literal=literal)


def launch(variant: Variant, table: Table, rows: Any, keys: Any) -> torch.Tensor | None:
    """See `bagua_kernels.launchers.multitensor.launch`."""
    device, sums = table.device, variant.rule.sums
    rows = rows if isinstance(rows, torch.Tensor) else uploaded(rows, device)
    # Read only where rounding is stochastic.
    if keys is None:
        seeds = torch.zeros((1, 2), dtype=torch.uint32, device=device)
    else:
        seeds = keys.view(torch.uint32) if isinstance(keys, torch.Tensor) else uploaded(keys, device)
    totals = torch.zeros(len(table), sums, dtype=torch.float64, device=device)
    with launching(rows) as stream:
        run = kernel(variant)
        for tensor, columns in enumerate(zip(*table.columns, strict=True)):
            grid = -(-int(table.sizes[tensor]) // (THREADS * ELEMENTS))
            grid = min(grid, MOST_BLOCKS_OF_SUMS) if sums else grid
            if not grid:
                continue
            partials = torch.empty((grid * THREADS, sums) if sums else (1, 1), dtype=torch.float64, device=device)
            arguments = [array(t) for t in (rows, seeds)]
            run[grid, THREADS, stream](
                *arguments, tensor, array(partials), *(array(in_order_of_memory(c)) for c in columns)
            )
            if sums:
                totals[tensor] = partials.sum(0)
    return totals if sums else None
