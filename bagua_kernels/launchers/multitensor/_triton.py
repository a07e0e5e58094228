"""Many tensors in Triton: a program takes one piece of one tensor."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import numpy as np
import torch
import triton.language as tl

from bagua_kernels.jit._triton import EXACT, LOAD, STORE, bits, compile_template, on_device
from bagua_kernels.jit.source import function_from_source
from bagua_kernels.launchers.multitensor import FACTOR, SCALARS, SKIP, Table, Variant, bindings

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
    return f"tl.load(a{column} + at{mask}{', other=0' if mask else ''})"


def write(mask: str, column: int, value: str) -> str:
    """The statement that stores a block of a column."""
    return f"tl.store(a{column} + at, {value}{mask})"


def source(variant: Variant) -> str:
    """The text of the kernel.

    The `like` arguments give the columns' types. A whole piece takes a path without masks. The compiler does not know that a
    mask from memory is constant, and would access element by element.
    """
    columns, sums = range(len(variant.dtypes)), range(variant.rule.sums)
    likes = ", ".join(f"like{i}_ptr" for i in columns)
    lines = [
        f"def over_pieces(addresses_ptr, sizes_ptr, rows_ptr, keys_ptr, partials_ptr, tensors_ptr, pieces_ptr, {likes}, "
        "CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):",
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
        address = f"tl.load(addresses_ptr + tensor * {len(variant.dtypes)} + {i})"
        lines.append(f"    a{i} = tl.cast({address}, like{i}_ptr.dtype, bitcast=True)")
    lines.append("    if ALIGNED:")
    lines += [f"        a{i} = tl.multiple_of(a{i}, {ALIGNMENT})" for i in columns]
    if variant.stochastic:
        lines += [
            "    seed_low = tl.cast(tl.load(keys_ptr + tensor * 2), tl.uint32)",
            "    seed_high = tl.cast(tl.load(keys_ptr + tensor * 2 + 1), tl.uint32)",
            "    key, second_key = random_key(seed_low, seed_high, tl.cast(start >> 32, tl.uint32))",
        ]
    lines += [f"    total{i} = tl.zeros([BLOCK], tl.float64)" for i in sums]
    for condition, mask in (("if left >= CHUNK:", ""), ("else:", ", mask=inside")):
        lines += [f"    {condition}", "        for first in range(0, CHUNK, BLOCK):"]
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


# What CUDA graphs copy from at each replay, for as long as there may be one: a few kilobytes for each capture.
CAPTURED: list[torch.Tensor] = []


def place(array: Any, device: torch.device) -> torch.Tensor:
    """A NumPy array on the device; through page-locked memory to a GPU, so that the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor
    locked = tensor.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        CAPTURED.append(locked)
    return locked.to(device, non_blocking=True)


def launch(variant: Variant, table: Table, rows: Any, keys: Any) -> torch.Tensor | None:
    """See `bagua_kernels.launchers.multitensor.launch`."""
    if variant.double:
        raise TypeError("Triton has no correctly rounded float64 rules; set the backend numba_cuda")
    device = table.device
    tasks = table.cached(("tasks",), lambda: [place(a, device) for a in (table.sizes, *table.tasks(CHUNK))])
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # Filled by each replay, but not before the first.
        addresses = place(table.addresses, device)
    else:
        addresses = table.cached(("addresses",), lambda: place(table.addresses, device))
    sizes, tensors, pieces = tasks
    sums = variant.rule.sums
    partials = torch.empty((len(tensors), sums), dtype=torch.float64, device=device)
    likes = [bits(torch.empty(0, dtype=dtype, device=device)) for dtype in variant.dtypes]
    rows = rows if isinstance(rows, torch.Tensor) else place(rows, device)
    if keys is None:
        keys = sizes
    elif not isinstance(keys, torch.Tensor):
        keys = place(keys.view(np.int32), device)
    if len(tensors):
        aligned = table.cached(("addresses", "aligned"), lambda: not (table.addresses % ALIGNMENT).any())
        with on_device(sizes):
            kernel(variant)[(len(tensors),)](
                addresses, sizes, rows, keys, partials, tensors, pieces, *likes,
                CHUNK=CHUNK, BLOCK=BLOCK, ALIGNED=aligned, num_warps=WARPS, **EXACT,
            )  # fmt: skip
    if not sums:
        return None
    totals = torch.zeros(len(table), sums, dtype=torch.float64, device=device)
    return totals.index_add_(0, tensors.long(), partials)
