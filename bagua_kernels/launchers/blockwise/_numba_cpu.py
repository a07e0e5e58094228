"""Block quantizers on the CPU: kernels over all blocks, and how they are launched.

Each function named `*_blocks` or `*_tasks` is a template, see `_numba_cpu_block`. Two things decide the speed besides
vectorised loops. Memory is asked for some blocks ahead, since the passes over a block make its reading and its arithmetic take
turns. And arrays are `borrowed`, since a block takes a dozen slices, each of which would count references atomically.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch

from bagua_kernels.jit._numba_cpu import LOAD, STORE, array, compile_template, run_parallel, runs_alone
from bagua_kernels.jit._numba_cpu_intrinsics import POINTER, borrowed, keep, packing, store_fence, wide_vectors
from bagua_kernels.jit.rule import Rule
from bagua_kernels.jit.source import function_from_source
from bagua_kernels.launchers.blockwise import Layout, piece_table, rule_bindings, rule_constants, seed_halves
from bagua_kernels.launchers.blockwise._numba_cpu_block import EXTREMES, LAYERS
from bagua_kernels.launchers.elementwise import call_lines
from bagua_kernels.rules.optimizers import ElementwiseRule
from bagua_kernels.rules.quantizers import BlockQuantizer

# Elements a task: large enough to hide the cost of a task, small enough for an even split over threads.
TASK = 16384


def encode_blocks(x, words, codes, counts, seed_low, seed_high, begin, end):
    wide_vectors()
    x, words, codes, counts = borrowed(x), borrowed(words), borrowed(codes), borrowed(counts)
    own = np.empty((max(SUMS, 1), BLOCK), np.float32)
    scratch = borrowed(own)
    for block in range(begin, end):
        start = block * BLOCK
        ask_for(x, start, BLOCK)
        ask_for(codes, block * STRIDE, STRIDE)
        values = x[start : start + own_size(counts, block, min(BLOCK, x.size - start))]
        here = codes[block * STRIDE : min((block + 1) * STRIDE, codes.size)]
        encode_block(values, words, here, scratch, block, start, seed_low, seed_high)
    keep(own)


def encode_pieces_blocks(addresses, sizes, firsts, words, codes, seed_low, seed_high, begin, end):
    """Piece p has `sizes[p]` elements at an address, and blocks from `firsts[p]` up to `firsts[p + 1]`."""
    wide_vectors()
    words, codes = borrowed(words), borrowed(codes)
    own = np.empty((max(SUMS, 1) + 1, BLOCK), np.float32)
    scratch = borrowed(own)
    padded_block = scratch[-1]
    piece = np.searchsorted(firsts, begin, "right") - 1
    for block in range(begin, end):
        while block >= firsts[piece + 1]:
            piece += 1
        x = numba.carray(pointer(addresses[piece]), (sizes[piece],))
        start = (block - firsts[piece]) * BLOCK
        ask_for(x, start, BLOCK)
        values = x[start : min(start + BLOCK, x.size)]
        for i in range(values.size):
            padded_block[i] = load_input(values[i])
        here = codes[block * STRIDE : (block + 1) * STRIDE]
        encode_block(padded_block[: values.size], words, here, scratch, block, block * BLOCK, seed_low, seed_high)
    keep(own)


def feedback_blocks(x, residual, words, codes, counts, factor, seed_low, seed_high, begin, end):
    wide_vectors()
    x, residual, words, codes = borrowed(x), borrowed(residual), borrowed(words), borrowed(codes)
    counts = borrowed(counts)
    own = np.empty((max(SUMS, 1) + 3, BLOCK), np.float32)
    scratch = borrowed(own)
    totals, scaled, loose = scratch[-1], scratch[-2], scratch[-3].view(np.uint8)
    for block in range(begin, end):
        start = block * BLOCK
        stop = start + own_size(counts, block, min(BLOCK, x.size - start))
        ask_for(x, start, BLOCK)
        ask_for(residual, start, BLOCK)
        values = x[start:stop]
        left = residual[start:stop]
        total = totals[: values.size]
        sent = scaled[: values.size]
        for i in range(values.size):
            total[i] = load_input(values[i]) + left[i]
            sent[i] = total[i] * factor
        here = codes[block * STRIDE : min((block + 1) * STRIDE, codes.size)]
        encode_block(sent, words, here, scratch, block, start, seed_low, seed_high)
        decode_block(words, here, sent, loose, block)
        for i in range(values.size):
            left[i] = remainder(total[i], sent[i], left[i])
    keep(own)


def decode_blocks(words, codes, out, begin, end):
    wide_vectors()
    words, codes, out = borrowed(words), borrowed(codes), borrowed(out)
    own = np.empty((2, BLOCK), out.dtype)
    scratch = borrowed(own)
    decoded, loose = scratch[0], scratch[1].view(np.uint8)
    streamed = is_streamed(out)
    for block in range(begin, end):
        start = block * BLOCK
        here = codes[block * STRIDE : min((block + 1) * STRIDE, codes.size)]
        target = out[start : min(start + BLOCK, out.size)]
        values = decoded[: target.size] if streamed else target
        decode_block(words, here, values, loose, block)
        if streamed:
            stream_block(values, target)
    if streamed:
        store_fence()
    keep(own)


def decode_sum_blocks(words, codes, out, scale, begin, end):
    wide_vectors()
    words, codes, out = borrowed(words), borrowed(codes), borrowed(out)
    own = np.empty((3, BLOCK), np.float32)
    scratch = borrowed(own)
    totals, rounded, loose = scratch[0], scratch[1].view(out.dtype), scratch[2].view(np.uint8)
    streamed = is_streamed(out)
    for block in range(begin, end):
        start = block * BLOCK
        target = out[start : min(start + BLOCK, out.size)]
        total = totals[: target.size]
        sum_block(words, codes, total, loose, scale, block)
        values = rounded[: target.size] if streamed else target
        for i in range(target.size):
            values[i] = store_output(total[i])
        if streamed:
            stream_block(values, target)
    if streamed:
        store_fence()
    keep(own)


def reduce_blocks(words, codes, out_words, out_codes, counts, scale, n, seed_low, seed_high, begin, end):
    wide_vectors()
    words, codes, out_words, out_codes = borrowed(words), borrowed(codes), borrowed(out_words), borrowed(out_codes)
    counts = borrowed(counts)
    own = np.empty((max(SUMS, 1) + 2, BLOCK), np.float32)
    scratch = borrowed(own)
    totals, loose = scratch[-1], scratch[-2].view(np.uint8)
    for block in range(begin, end):
        start = block * BLOCK
        total = totals[: own_size(counts, block, min(BLOCK, n - start))]
        ask_for(out_codes, block * STRIDE, STRIDE)
        sum_block(words, codes, total, loose, scale, block)
        here = out_codes[block * STRIDE : min((block + 1) * STRIDE, out_codes.size)]
        encode_block(total, out_words, here, scratch, block, start, seed_low, seed_high)
    keep(own)


def encode_tasks(x, words, codes, counts, seed_low, seed_high, blocks, task):
    for t in numba.prange((blocks + task - 1) // task):
        serial(x, words, codes, counts, seed_low, seed_high, t * task, min((t + 1) * task, blocks))


def encode_pieces_tasks(addresses, sizes, firsts, words, codes, seed_low, seed_high, blocks, task):
    for t in numba.prange((blocks + task - 1) // task):
        begin, end = t * task, min((t + 1) * task, blocks)
        serial(addresses, sizes, firsts, words, codes, seed_low, seed_high, begin, end)


def feedback_tasks(x, residual, words, codes, counts, factor, seed_low, seed_high, blocks, task):
    for t in numba.prange((blocks + task - 1) // task):
        begin, end = t * task, min((t + 1) * task, blocks)
        serial(x, residual, words, codes, counts, factor, seed_low, seed_high, begin, end)


def decode_tasks(words, codes, out, blocks, task):
    for t in numba.prange((blocks + task - 1) // task):
        serial(words, codes, out, t * task, min((t + 1) * task, blocks))


def decode_sum_tasks(words, codes, out, scale, blocks, task):
    for t in numba.prange((blocks + task - 1) // task):
        serial(words, codes, out, scale, t * task, min((t + 1) * task, blocks))


def reduce_tasks(words, codes, out_words, out_codes, counts, scale, n, seed_low, seed_high, blocks, task):
    for t in numba.prange((blocks + task - 1) // task):
        begin, end = t * task, min((t + 1) * task, blocks)
        serial(words, codes, out_words, out_codes, counts, scale, n, seed_low, seed_high, begin, end)


TEMPLATES: dict[str, tuple[Rule, Rule]] = {
    "encode": (encode_blocks, encode_tasks),
    "encode_pieces": (encode_pieces_blocks, encode_pieces_tasks),
    "feedback": (feedback_blocks, feedback_tasks),
    "decode": (decode_blocks, decode_tasks),
    "decode_sum": (decode_sum_blocks, decode_sum_tasks),
    "reduce": (reduce_blocks, reduce_tasks),
}
# Kernels that quantize what they have summed up themselves, in float32, whatever they read or write.
INTERMEDIATE = ("encode_pieces", "feedback", "decode_sum", "reduce", "decode_apply")


@functools.cache
def bound(
    rule: BlockQuantizer, block: int, inner: torch.dtype, outer: torch.dtype, stochastic: bool, given: bool
) -> dict[str, Any]:
    """What the names in the templates stand for, for blocks of one dtype inside and vectors of another outside."""
    layout = Layout(0, block, rule.words, rule.bits)
    bindings: dict[str, Any] = {
        "BLOCK": block,
        "STRIDE": layout.stride,
        "STOCHASTIC": stochastic,
        "GIVEN": given,
        "load": LOAD[inner],
        "store": STORE[inner],
        "load_input": LOAD[outer],
        "store_output": STORE[outer],
        "pointer": POINTER[outer],
        **rule_constants(rule),
        **rule_bindings(rule),
    }
    if layout.fields > 1:
        bindings["pack"], bindings["unpack"] = packing(layout.fields, layout.stride)
    bindings["extremes_of"] = compile_template(EXTREMES[rule.extremes], bindings)
    for layer in LAYERS:
        bindings |= {template.__name__: compile_template(template, bindings) for template in layer}
    return bindings


@functools.cache
def kernels(
    name: str, rule: BlockQuantizer, block: int, dtype: torch.dtype, stochastic: bool = False, given: bool = False
) -> tuple[Any, Any]:
    """The serial and the parallel form of a kernel."""
    bindings = bound(rule, block, torch.float32 if name in INTERMEDIATE else dtype, dtype, stochastic, given)
    over_blocks, over_tasks = TEMPLATES[name]
    serial = compile_template(over_blocks, bindings)
    return serial, compile_template(over_tasks, {"serial": serial}, parallel=True)


def apply_source(update: ElementwiseRule, scalars: int, position: int) -> str:
    """The text of the serial and the parallel kernel that decode and apply a rule of this number of arguments."""
    others = [i for i in range(update.arrays) if i != position]
    arguments = ", ".join([f"a{i}" for i in others] + [f"s{i}" for i in range(scalars)])
    lines = [
        f"def apply_blocks(words, codes, {arguments}, scale, n, begin, end):",
        "    wide_vectors()",
        "    words, codes = borrowed(words), borrowed(codes)",
        "    own = np.empty((2, BLOCK), np.float32)",
        "    scratch = borrowed(own)",
        "    totals, loose = scratch[0], scratch[1].view(np.uint8)",
        "    for block in range(begin, end):",
        "        start = block * BLOCK",
        "        total = totals[: min(BLOCK, n - start)]",
        "        sum_block(words, codes, total, loose, scale, block)",
    ]
    for i in others:
        lines += [f"        ask_for(a{i}, start, BLOCK)", f"        b{i} = a{i}[start : start + total.size]"]
    lines += ["        for i in range(total.size):", f"            v{position} = total[i]"]
    lines += [f"            v{i} = load_{i}(b{i}[i])" for i in others]
    lines += [f"            {call_lines(update, scalars)}"]
    lines += [f"            b{i}[i] = store_{i}(r{i})" for i in update.writes]
    lines += ["    keep(own)"]
    lines += [
        f"def apply_tasks(words, codes, {arguments}, scale, n, blocks, task):",
        "    for t in numba.prange((blocks + task - 1) // task):",
        f"        serial(words, codes, {arguments}, scale, n, t * task, min((t + 1) * task, blocks))",
    ]
    return "\n".join(lines) + "\n"


@functools.cache
def apply_kernels(
    rule: BlockQuantizer,
    block: int,
    update: ElementwiseRule,
    scalars: int,
    position: int,
    dtypes: tuple[torch.dtype, ...],
) -> tuple[Any, Any]:
    """The serial and the parallel kernel that decode and apply a rule."""
    bindings = bound(rule, block, torch.float32, torch.float32, False, False) | {"rule": update.function}
    others = [i for i in range(update.arrays) if i != position]
    for i, dtype in zip(others, dtypes, strict=True):
        bindings |= {f"load_{i}": LOAD[dtype], f"store_{i}": STORE[dtype]}
    text = apply_source(update, scalars, position)
    names = {
        "__name__": __name__,
        "numba": numba,
        "np": np,
        "borrowed": borrowed,
        "keep": keep,
        "wide_vectors": wide_vectors,
    }
    serial = compile_template(function_from_source(text, "apply_blocks", names, __file__), bindings)
    over_tasks = function_from_source(text, "apply_tasks", names, __file__)
    return serial, compile_template(over_tasks, {"serial": serial}, parallel=True)


def run(kernel: tuple[Any, Any], layout: Layout, *arguments: Any) -> None:
    """Calls the kernel over all blocks, on one thread if that is as fast."""
    serial, parallel = kernel
    if runs_alone(layout.n):
        serial(*arguments, 0, layout.blocks)
    else:
        run_parallel(parallel, *arguments, layout.blocks, max(1, TASK // layout.block))


NO_COUNTS = np.empty(0, np.int32)


def counts_array(counts: torch.Tensor | None) -> Any:
    """The counts as an array, which is empty where there are none: one kernel does for both."""
    return NO_COUNTS if counts is None else array(counts)


def clear_pads(words: Any, codes: Any, layout: Layout) -> None:
    """Zeroes the bytes after the scales and after the codes."""
    words[layout.blocks * layout.words :] = 0
    codes[layout.used_code_bytes :] = 0


def encode(
    rule: BlockQuantizer,
    x: torch.Tensor,
    payload: torch.Tensor,
    layout: Layout,
    seed: int | None,
    given: bool,
    counts: torch.Tensor | None = None,
) -> None:
    """See `bagua_kernels.launchers.blockwise.encode`."""
    words, codes = map(array, layout.parts(payload))
    kernel = kernels("encode", rule, layout.block, x.dtype, seed is not None, given)
    run(kernel, layout, array(x), words, codes, counts_array(counts), *map(np.uint32, seed_halves(seed)))
    clear_pads(words, codes, layout)


def encode_pieces(
    rule: BlockQuantizer, pieces: Sequence[torch.Tensor], payload: torch.Tensor, layout: Layout, seed: int | None
) -> None:
    """See `bagua_kernels.launchers.blockwise.encode_pieces`."""
    words, codes = map(array, layout.parts(payload))
    addresses, sizes, firsts = piece_table(pieces, layout.block)
    kernel = kernels("encode_pieces", rule, layout.block, pieces[0].dtype, seed is not None)
    run(kernel, layout, addresses, sizes, firsts, words, codes, *map(np.uint32, seed_halves(seed)))
    clear_pads(words, codes, layout)


def feedback(
    rule: BlockQuantizer,
    x: torch.Tensor,
    residual: torch.Tensor,
    payload: torch.Tensor,
    layout: Layout,
    factor: float,
    seed: int | None,
    counts: torch.Tensor | None = None,
) -> None:
    """See `bagua_kernels.launchers.blockwise.feedback`."""
    words, codes = map(array, layout.parts(payload))
    kernel = kernels("feedback", rule, layout.block, x.dtype, seed is not None)
    halves = map(np.uint32, seed_halves(seed))
    arguments = (array(x), array(residual), words, codes, counts_array(counts), np.float32(factor))
    run(kernel, layout, *arguments, *halves)
    clear_pads(words, codes, layout)


def decode(rule: BlockQuantizer, payload: torch.Tensor, out: torch.Tensor, layout: Layout) -> None:
    """See `bagua_kernels.launchers.blockwise.decode`."""
    words, codes = map(array, layout.parts(payload))
    run(kernels("decode", rule, layout.block, out.dtype), layout, words, codes, array(out))


def decode_sum(rule: BlockQuantizer, payloads: torch.Tensor, out: torch.Tensor, scale: float, layout: Layout) -> None:
    """See `bagua_kernels.launchers.blockwise.decode_sum`."""
    words, codes = map(array, layout.parts(payloads))
    kernel = kernels("decode_sum", rule, layout.block, out.dtype)
    run(kernel, layout, words, codes, array(out), np.float32(scale))


def reduce(
    rule: BlockQuantizer,
    payloads: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    layout: Layout,
    seed: int | None,
    counts: torch.Tensor | None = None,
) -> None:
    """See `bagua_kernels.launchers.blockwise.reduce`."""
    words, codes = map(array, layout.parts(payloads))
    out_words, out_codes = map(array, layout.parts(out))
    kernel = kernels("reduce", rule, layout.block, torch.float32, seed is not None)
    arguments = (words, codes, out_words, out_codes, counts_array(counts), np.float32(scale), layout.n)
    run(kernel, layout, *arguments, *map(np.uint32, seed_halves(seed)))
    clear_pads(out_words, out_codes, layout)


def decode_apply(
    rule: BlockQuantizer,
    payloads: torch.Tensor,
    update: ElementwiseRule,
    arrays: tuple[torch.Tensor, ...],
    scalars: tuple[float, ...],
    scale: float,
    layout: Layout,
    position: int,
    whole: Layout,
    first: int,
) -> None:
    """See `bagua_kernels.launchers.blockwise.decode_apply`."""
    words, codes = map(array, whole.parts(payloads, first))
    kernel = apply_kernels(rule, layout.block, update, len(scalars), position, tuple(a.dtype for a in arrays))
    run(kernel, layout, words, codes, *map(array, arrays), *map(np.float32, scalars), np.float32(scale), layout.n)
