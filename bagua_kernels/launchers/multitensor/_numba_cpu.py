"""Many tensors on the CPU: one launch for all of them, cut into parts of equally many elements."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit._numba_cpu import LOAD, STORE, compile_template
from bagua_kernels.jit._numba_cpu_intrinsics import VECTOR, prefetch_lines, wide_vectors
from bagua_kernels.jit._numba_cpu_sharing import shared
from bagua_kernels.jit._numba_cpu_threads import run, threads_for
from bagua_kernels.jit.source import function_from_source
from bagua_kernels.launchers.multitensor import FACTOR, SCALARS, SKIP, Table, Variant, bindings

CHUNK = 32768
# What lies ahead is asked for a block at a time: with four to six streams the processor's own prefetcher leaves some waits.
BLOCK = 64
AHEAD = 2048
HAS_FLOAT64 = True
NEEDS_TENSORS = False


def source(variant: Variant) -> str:
    """The text of a kernel over a block, over one piece of a tensor, and over parts of all pieces."""
    columns, sums = range(len(variant.dtypes)), range(variant.rule.sums)
    scalars, keys = list(_scalars(variant)), _keys(variant)
    body = variant.body(lambda c: f"a{c}[i]", lambda c, value: f"a{c}[i] = {value}", "np.uint32(start + i)")
    lines = [
        f"def over_block({', '.join([*(f'a{c}' for c in columns), *scalars, *keys])}, start):",
        "    wide_vectors()",
        *(f"    total{i} = 0.0" for i in sums),
        "    for i in range(a0.size):",
        *(f"        {line}" for line in body),
        *(f"        total{i} += np.float64(term{i})" for i in sums),
    ]
    if sums:
        lines.append(f"    return {', '.join(f'total{i}' for i in sums)},")
    lines.append("def over_piece(addresses, rows, keys, partials, task, tensor, start, n):")
    lines += [f"    {line}" for line in _piece(variant)]
    arguments = "addresses, sizes, rows, keys, partials, tensors, pieces, bounds, begin, end, threads, launcher"
    # A piece is part of this function's text: a function of its own would be compiled twice, the second time as part of this.
    lines += [
        f"def over_pieces({arguments}):",
        "    if shared(begin, end, threads, launcher):",
        "        return",
        "    for task in range(bounds[begin], bounds[end]):",
        "        tensor = tensors[task]",
        f"        start = pieces[task] * np.int64({CHUNK})",
        f"        n = min(sizes[tensor] - start, {CHUNK})",
        f"        if rows[tensor, {SKIP}] == 0:",
        *(f"            {line}" for line in _piece(variant)),
    ]
    return "\n".join(lines) + "\n"


def _scalars(variant: Variant) -> dict[str, str]:
    """The names of a block's scalars and keys, and where in a tensor's row they are."""
    found = {"factor": FACTOR} | {f"s{i}": SCALARS + i for i in range(variant.scalars)}
    if variant.width > SCALARS + variant.scalars:
        found["rate"] = SCALARS + variant.scalars
    return {name: f"rows[tensor, {place}]" for name, place in found.items()}


def _piece(variant: Variant) -> list[str]:
    """The lines that take the `n` elements from `start` on of one tensor through blocks."""
    lines, scalars = [], _scalars(variant)
    for i, dtype in enumerate(variant.dtypes):
        lines.append(f"p{i} = addresses[tensor, {i}] + start * {dtype.itemsize}")
    lines += [f"{name} = {value}" for name, value in scalars.items()]
    if variant.stochastic:
        lines.append("key, second_key = random_key(keys[tensor, 0], keys[tensor, 1], np.uint32(start >> 32))")
    lines.append(f"for first in range(0, n, {BLOCK}):")
    lines.append(f"    size = min({BLOCK}, n - first)")
    for i, dtype in enumerate(variant.dtypes):
        lines.append(f"    here = p{i} + first * {dtype.itemsize}")
        lines.append(f"    a{i} = vector_{i}(here, size)")
        lines.append(f"    prefetch_lines(here + {AHEAD}, {BLOCK * dtype.itemsize})")
    block = [f"a{c}" for c in range(len(variant.dtypes))]
    call = f"over_block({', '.join([*block, *scalars, *_keys(variant)])}, start + first)"
    lines.append(f"    {'totals = ' if variant.rule.sums else ''}{call}")
    return lines + [f"    partials[task, {i}] += totals[{i}]" for i in range(variant.rule.sums)]


def _keys(variant: Variant) -> list[str]:
    return ["key", "second_key"] if variant.stochastic else []


def _template(variant: Variant, name: str) -> Any:
    return function_from_source(source(variant), name, {"__name__": __name__, "np": np}, __file__)


def _names(variant: Variant) -> dict[str, Any]:
    """What the templates read, the kernel over a block among it."""
    literal = np.float64 if variant.double else np.float32
    vectors = {f"vector_{i}": VECTOR[dtype] for i, dtype in enumerate(variant.dtypes)}
    # Sums may be taken in any order, which lets them be taken in vectors; the order is the same at each call.
    fastmath = {"reassoc", "nsz"} if variant.rule.sums else False
    names = {**bindings(variant, LOAD, STORE), **vectors}
    names |= {"wide_vectors": wide_vectors, "prefetch_lines": prefetch_lines, "shared": shared}
    block = compile_template(_template(variant, "over_block"), names, literal=literal, fastmath=fastmath, helper=True)
    return {**names, "over_block": block}


@functools.cache
def piece_kernel(variant: Variant) -> Any:
    """The kernel over one piece of a tensor, for other templates."""
    return compile_template(_template(variant, "over_piece"), _names(variant), helper=True)


@functools.cache
def kernel(variant: Variant) -> Any:
    """The kernel over a range of parts."""
    return compile_template(_template(variant, "over_pieces"), _names(variant))


def parts(table: Table, most: int) -> tuple[Any, Any, Any]:
    """The tensor and number of each piece, and where in their list each part begins."""
    tensors, pieces = table.tasks(CHUNK)
    elements = np.cumsum(np.minimum(table.sizes[tensors] - pieces.astype(np.int64) * CHUNK, CHUNK))
    total = int(elements[-1]) if len(elements) else 0
    count = max(1, min(most, len(tensors)))
    bounds = np.searchsorted(elements, np.arange(count + 1) * (total / count))
    bounds[-1] = len(tensors)
    return tensors, pieces, bounds


NO_KEYS = np.zeros((0, 2), np.uint32)


def launch(variant: Variant, table: Table, rows: Any, keys: Any) -> torch.Tensor | None:
    """See `bagua_kernels.launchers.multitensor.launch`."""
    elements = int(table.sizes.sum())
    threads = threads_for(elements, elements)
    tensors, pieces, bounds = table.cached(("parts", threads), lambda: parts(table, threads))
    partials = np.zeros((len(tensors) if variant.rule.sums else 0, variant.rule.sums))
    if isinstance(rows, torch.Tensor):
        rows = rows.numpy()
    if isinstance(keys, torch.Tensor):
        keys = keys.numpy().view(np.uint32)
    arguments = (
        table.addresses,
        table.sizes,
        rows,
        NO_KEYS if keys is None else keys,
        partials,
        tensors,
        pieces,
        bounds,
    )
    run(kernel(variant), arguments, len(bounds) - 1, len(bounds) - 1)
    if not variant.rule.sums:
        return None
    sums = torch.zeros(len(table), variant.rule.sums, dtype=torch.float64)
    return sums.index_add_(0, torch.from_numpy(tensors), torch.from_numpy(partials))
