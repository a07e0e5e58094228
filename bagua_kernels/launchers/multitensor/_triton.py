"""Many tensors in Triton: a program takes one piece of one tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import triton.language as tl

from bagua_kernels.jit._triton import EXACT, LOAD, STORE, bits, compile_template, on_device
from bagua_kernels.jit.source import function_from_source
from bagua_kernels.launchers.multitensor import FACTOR, SCALARS, SKIP, Table, Variant, bindings
from bagua_kernels.upload import uploaded

BLOCK = 1024
# A program first loads addresses and scalars; several blocks share that wait.
CHUNK = 4 * BLOCK
# With more elements a thread the compiler needs all registers, or spills.
WARPS = 8
ALIGNMENT = 16
HAS_FLOAT64 = False
NEEDS_TENSORS = False


def read(mask: str, column: int) -> str:
    """The expression that loads a block of a column."""
    return f"tl.load(a{column} + at{mask}, other=0)" if mask else f"tl.load(b{column} + at)"


def write(mask: str, column: int, value: str) -> str:
    """The statement that stores a block of a column."""
    return f"tl.store({'a' if mask else 'b'}{column} + at, {value}{mask})"


def source(variant: Variant) -> str:
    """The text of the kernel.

    The `like` arguments give the columns' types. A whole piece of a tensor whose columns are all aligned takes a path without
    masks. The compiler does not know that a mask from memory is constant, and would access element by element. Tensors that
    are not aligned take the other path, and do not keep the rest of the launch from the first one.
    """
    columns, sums = range(len(variant.dtypes)), range(variant.rule.sums)
    likes = ", ".join(f"like{i}_ptr" for i in columns)
    lines = [
        f"def over_pieces(addresses_ptr, sizes_ptr, rows_ptr, keys_ptr, partials_ptr, tensors_ptr, pieces_ptr, {likes}, "
        "CHUNK: tl.constexpr, BLOCK: tl.constexpr):",
        "    task = tl.program_id(0)",
        "    tensor = tl.cast(tl.load(tensors_ptr + task), tl.int64)",
        "    start = tl.cast(tl.load(pieces_ptr + task), tl.int64) * CHUNK",
        "    left = tl.load(sizes_ptr + tensor) - start",
        f"    row_ptr = rows_ptr + tensor * {variant.width}",
        f"    factor = tl.load(row_ptr + {FACTOR})",
        # Nothing is left to do where an update is skipped.
        f"    left = tl.where(tl.load(row_ptr + {SKIP}) != 0.0, 0, left)",
    ]
    lines += [f"    s{i} = tl.load(row_ptr + {SCALARS + i})" for i in range(variant.scalars)]
    if variant.width > SCALARS + variant.scalars:
        lines.append(f"    rate = tl.load(row_ptr + {SCALARS + variant.scalars})")
    for i in columns:
        lines.append(f"    place{i} = tl.load(addresses_ptr + tensor * {len(variant.dtypes)} + {i})")
        lines.append(f"    a{i} = tl.cast(place{i}, like{i}_ptr.dtype, bitcast=True)")
    lines.append(f"    odd = ({' | '.join(f'place{i}' for i in columns)}) & {ALIGNMENT - 1}")
    if variant.stochastic:
        lines += [
            "    seed_low = tl.cast(tl.load(keys_ptr + tensor * 2), tl.uint32)",
            "    seed_high = tl.cast(tl.load(keys_ptr + tensor * 2 + 1), tl.uint32)",
            "    key, second_key = random_key(seed_low, seed_high, tl.cast(start >> 32, tl.uint32))",
        ]
    lines += [f"    total{i} = tl.zeros([BLOCK], tl.float64)" for i in sums]
    for condition, mask in (("if (left >= CHUNK) & (odd == 0):", ""), ("else:", ", mask=inside")):
        lines.append(f"    {condition}")
        if not mask:
            lines += [f"        b{i} = tl.multiple_of(a{i}, {ALIGNMENT})" for i in columns]
        lines.append("        for first in range(0, CHUNK, BLOCK):")
        lines.append("            at = start + first + tl.arange(0, BLOCK)")
        if mask:
            lines.append("            inside = first + tl.arange(0, BLOCK) < left")
        body = variant.body(partial(read, mask), partial(write, mask), "tl.cast(at, tl.uint32)")
        lines += [f"            {line}" for line in body]
        inside = "tl.where(inside, term{0}, 0.0)" if mask else "term{0}"
        lines += [f"            total{i} += tl.cast({inside.format(i)}, tl.float64)" for i in sums]
    lines += [f"    tl.store(partials_ptr + task * {variant.rule.sums} + {i}, tl.sum(total{i}))" for i in sums]
    return "\n".join(lines) + "\n"


@functools.cache
def kernel(variant: Variant) -> Any:
    """The compiled kernel."""
    template = function_from_source(source(variant), "over_pieces", {"__name__": __name__, "tl": tl})
    return compile_template(template, bindings(variant, LOAD, STORE))


def sum_pieces(partials_ptr, firsts_ptr, totals_ptr, SUMS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds up the pieces of a tensor in one order, so that all ranks get the same bits: atomic additions have none."""
    tensor = tl.program_id(0)
    first = tl.load(firsts_ptr + tensor)
    last = tl.load(firsts_ptr + tensor + 1)
    for i in tl.static_range(SUMS):
        total = tl.zeros([BLOCK], tl.float64)
        begin = first
        while begin < last:
            piece = begin + tl.arange(0, BLOCK)
            total += tl.load(partials_ptr + piece * SUMS + i, mask=piece < last, other=0.0)
            begin += BLOCK
        tl.store(totals_ptr + tensor * SUMS + i, tl.sum(total))


@functools.cache
def kernel_of_sums() -> Any:
    """The compiled `sum_pieces`."""
    return compile_template(sum_pieces, {})


def launch(variant: Variant, table: Table, rows: Any, keys: Any) -> torch.Tensor | None:
    """See `bagua_kernels.launchers.multitensor.launch`."""
    if variant.double:
        raise TypeError("Triton has no correctly rounded float64 rules; set the backend numba_cuda")
    device, sums = table.device, variant.rule.sums
    sizes, tensors, pieces, firsts = on_stream(table, "tasks", lambda: _tasks(table))
    addresses = on_stream(table, "addresses", lambda: uploaded(table.addresses, device))
    partials = torch.empty((len(tensors), sums), dtype=torch.float64, device=device)
    likes = table.cached(
        ("likes", variant.dtypes), lambda: [bits(torch.empty(0, dtype=d, device=device)) for d in variant.dtypes]
    )
    rows = rows if isinstance(rows, torch.Tensor) else uploaded(rows, device)
    if keys is None:
        keys = sizes
    elif not isinstance(keys, torch.Tensor):
        keys = uploaded(keys.view(np.int32), device)
    totals = torch.empty(len(table), sums, dtype=torch.float64, device=device) if sums else None
    with on_device(sizes):
        if len(tensors):
            kernel(variant)[(len(tensors),)](
                addresses, sizes, rows, keys, partials, tensors, pieces, *likes,
                CHUNK=CHUNK, BLOCK=BLOCK, num_warps=WARPS, **EXACT,
            )  # fmt: skip
        if totals is not None and len(table):
            kernel_of_sums()[(len(table),)](partials, firsts, totals, SUMS=sums, BLOCK=BLOCK, num_warps=4)
    return totals


def on_stream(table: Table, name: str, make: Callable[[], Any]) -> Any:
    """What is uploaded for a table, and kept for further launches on the current stream.

    Another stream could read it before it is there. What is uploaded in a capture is filled by each replay, but not before the
    first one, so that it is not kept.
    """
    if table.device.type != "cuda":
        return table.cached((name,), make)
    if torch.cuda.is_current_stream_capturing():
        return make()
    return table.cached((name, torch.cuda.current_stream(table.device).cuda_stream), make)


def _tasks(table: Table) -> list[torch.Tensor]:
    """On the table's device: the sizes of tensors; the tensor and the number of each piece; where each tensor's pieces begin."""
    tensors, pieces = table.tasks(CHUNK)
    firsts = np.searchsorted(tensors, np.arange(len(table) + 1)).astype(np.int32)
    return [uploaded(each, table.device) for each in (table.sizes, tensors, pieces, firsts)]
