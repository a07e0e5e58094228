"""Block quantizers in Numba-CUDA: a warp takes a block, a lane every 32nd element of it.

The extremes of a block are found by atomic minima and maxima of integers in shared memory: exact in any order, fast in
hardware, and known to the simulator, which has no warp shuffles. A lane packs the codes of the elements of its own bytes,
which lie a stride apart, so that lanes still read neighbours and no ballot is needed. Only rules do float arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import cuda

from bagua_kernels.jit._numba_cuda import LOAD, STORE, array, compile_template, launching
from bagua_kernels.jit.source import function_from_source
from bagua_kernels.launchers.arguments import padded
from bagua_kernels.launchers.blockwise import Layout, rule_bindings, rule_constants, seed_halves
from bagua_kernels.launchers.elementwise import call_lines
from bagua_kernels.rules.optimizers import ElementwiseRule
from bagua_kernels.rules.quantizers import BlockQuantizer

LANES = 32


def add(total, value):
    """The sum of two float32."""
    return total + value


def multiplied(total, scale):
    """The product of two float32."""
    return total * scale


def tree_sum(summands, warp, lane):
    """Adds up the row of a warp in the order that the wire format fixes; every thread must call it."""
    half = BLOCK // 2
    while half > 0:
        cuda.syncthreads()
        for i in range(lane, half, LANES):
            summands[warp, i] = add(summands[warp, i], summands[warp, i + half])
        half //= 2
    cuda.syncthreads()
    total = summands[warp, 0]
    # Nobody overwrites the row before everybody has read it.
    cuda.syncthreads()
    return total


def block_sum(values, shift, start, stop, unit_of_block, term, warp, lane):
    """The sum of one of the three terms over a block; every thread must call it."""
    summands = cuda.shared.array((WARPS, BLOCK), np.float32)
    for i in range(lane, BLOCK, LANES):
        summands[warp, i] = np.float32(0.0)
        if start + i < stop:
            summands[warp, i] = terms(load(values[start + i - shift]), unit_of_block)[term]
    return tree_sum(summands, warp, lane)


def extremes_of(values, shift, start, stop, warp, lane):
    """The extremes of a block; every thread must call it."""
    ranges = cuda.shared.array((WARPS, 2), np.int32)
    low = np.int32(0x7FFFFFFF)
    high = np.int32(-0x80000000)
    if lane == 0:
        ranges[warp, 0] = low
        ranges[warp, 1] = high
    cuda.syncthreads()
    for i in range(start + lane, stop, LANES):
        bits = float_bits(load(values[i - shift]))
        if RANGE:
            key = ordered(bits)
            low = min(low, key)
            high = max(high, key)
        else:
            low = np.int32(0)
            high = max(high, np.int32(bits & np.int32(0x7FFFFFFF)))
    cuda.atomic.min(ranges, (warp, 0), low)
    cuda.atomic.max(ranges, (warp, 1), high)
    cuda.syncthreads()
    return ranges[warp, 0], ranges[warp, 1]


def code_at(values, shift, i, a, b, c, d, key, second_key):
    """The code of element `i`."""
    noise = np.float32(0.0)
    if STOCHASTIC:
        noise = dither(random_bits(np.uint32(i), key, second_key))
    return np.int32(encode(load(values[i - shift]), a, b, c, d, noise, np.int32(LEVELS)) & np.int32(MASK))


def own_stop(counts, n, block):
    """Where a block's own elements end; at its end, or the vector's, if there are no counts."""
    stop = min((block + 1) * BLOCK, n)
    if COUNTED and block * BLOCK < n:
        stop = min(stop, block * BLOCK + max(np.int64(counts[block]), np.int64(0)))
    return stop


def encode_block(values, shift, words, codes, counts, n, seed_low, seed_high, warp, lane, block):
    """Encodes the own elements of one block, found in `values` at their index less `shift`; every thread must call it.

    A block without any is one of zeros. The codes of other elements are 0.
    """
    start = block * BLOCK
    stop = own_stop(counts, n, block)
    first = np.int32(0)
    second = np.int32(0)
    if GIVEN:
        if start < n:
            first = words[block * WORDS]
            second = words[block * WORDS + WORDS - 1]
    else:
        low, high = extremes_of(values, shift, start, stop, warp, lane)
        if stop <= start:
            low = np.int32(0)
            high = np.int32(0)
        sum0 = np.float32(0.0)
        sum1 = np.float32(0.0)
        sum2 = np.float32(0.0)
        if SUMS > 0:
            sum0 = block_sum(values, shift, start, stop, unit(low, high), 0, warp, lane)
        if SUMS > 1:
            sum1 = block_sum(values, shift, start, stop, unit(low, high), 1, warp, lane)
            sum2 = block_sum(values, shift, start, stop, unit(low, high), 2, warp, lane)
        if start < n:
            first, second = scales(low, high, sum0, sum1, sum2, np.float32(max(stop - start, 1)), np.int32(LEVELS))
            if lane == 0:
                words[block * WORDS] = first
                if WORDS == 2:
                    words[block * WORDS + 1] = second
    if start < n:
        a, b, c, d = encode_constants(first, second, np.int32(LEVELS))
        key, second_key = random_key(np.uint32(seed_low), np.uint32(seed_high), np.uint32(start >> 32))
        for at in range(lane, min(STRIDE, stop - start), LANES):
            packed = np.int32(0)
            for field in range(FIELDS):
                i = start + field * STRIDE + at
                if i < stop:
                    packed |= code_at(values, shift, i, a, b, c, d, key, second_key) << (field * BITS)
            codes[block * STRIDE + at] = np.uint8(packed)
    # What is left of the block's codes is zero; the warp of the last block also zeroes the bytes after scales and codes.
    if start < n:
        last = start + BLOCK >= n
        end = codes.size if last else (block + 1) * STRIDE
        for i in range(block * STRIDE + min(STRIDE, stop - start) + lane, end, LANES):
            codes[i] = 0
        if last and (block + 1) * WORDS + lane < words.size:
            words[(block + 1) * WORDS + lane] = 0


def decoded(words, codes, at_word, at_code, i, a, b, c, d):
    """The value of element `i` of a block whose codes start at `at_code`."""
    code = (np.int32(codes[at_code + i % STRIDE]) >> np.int32(i // STRIDE * BITS)) & np.int32(MASK)
    if SIGNED:
        code = (code ^ np.int32(HALF)) - np.int32(HALF)
    return decode(np.int32(code), a, b, c, d, np.int32(LEVELS))


def encode_kernel(x, words, codes, counts, n, seed_low, seed_high):
    warp, lane = cuda.threadIdx.y, cuda.threadIdx.x
    encode_block(x, 0, words, codes, counts, n, seed_low, seed_high, warp, lane, cuda.blockIdx.x * WARPS + warp)


def feedback_kernel(x, residual, words, codes, counts, n, factor, seed_low, seed_high):
    scaled = cuda.shared.array(SUMMED, np.float32)
    warp, lane = cuda.threadIdx.y, cuda.threadIdx.x
    block = cuda.blockIdx.x * WARPS + warp
    shift = (block - warp) * BLOCK
    start = block * BLOCK
    stop = own_stop(counts, n, block)
    for i in range(start + lane, stop, LANES):
        scaled[i - shift] = multiplied(compensated(load_input(x[i]), residual[i]), factor)
    encode_block(scaled, shift, words, codes, counts, n, seed_low, seed_high, warp, lane, block)
    # The codes of a byte come from several lanes' elements.
    cuda.syncthreads()
    if start < n:
        at = block * WORDS
        a, b, c, d = decode_constants(words[at], words[at + WORDS - 1], np.int32(LEVELS))
        for i in range(start + lane, stop, LANES):
            sent = decoded(words, codes, at, block * STRIDE, i - start, a, b, c, d)
            residual[i] = remainder(compensated(load_input(x[i]), residual[i]), sent, residual[i])


def decode_kernel(words, codes, out):
    block = cuda.blockIdx.x * WARPS + cuda.threadIdx.y
    start = block * BLOCK
    if start < out.size:
        at = block * WORDS
        a, b, c, d = decode_constants(words[at], words[at + WORDS - 1], np.int32(LEVELS))
        for i in range(start + cuda.threadIdx.x, min(start + BLOCK, out.size), LANES):
            out[i] = store(decoded(words, codes, at, block * STRIDE, i - start, a, b, c, d))


def sum_block(totals, shift, words, codes, size, ranks, n, scale, lane, block):
    """Sums the decoded payloads, `size` bytes each, over one block in rank order.

    `words` and `codes` reach to the end of the last payload. A lane reads and writes only its own elements of `totals`.
    """
    start = block * BLOCK
    stop = min(start + BLOCK, n)
    if start < n:
        for i in range(start + lane, stop, LANES):
            totals[i - shift] = np.float32(0.0)
        for rank in range(ranks):
            at = rank * (size // 4) + block * WORDS
            at_code = rank * size + block * STRIDE
            a, b, c, d = decode_constants(words[at], words[at + WORDS - 1], np.int32(LEVELS))
            for i in range(start + lane, stop, LANES):
                totals[i - shift] = add(totals[i - shift], decoded(words, codes, at, at_code, i - start, a, b, c, d))
        for i in range(start + lane, stop, LANES):
            totals[i - shift] = multiplied(totals[i - shift], scale)


def decode_sum_kernel(words, codes, size, ranks, out, scale):
    totals = cuda.shared.array(SUMMED, np.float32)
    warp, lane = cuda.threadIdx.y, cuda.threadIdx.x
    block = cuda.blockIdx.x * WARPS + warp
    shift = (block - warp) * BLOCK
    sum_block(totals, shift, words, codes, size, ranks, out.size, scale, lane, block)
    for i in range(block * BLOCK + lane, min(block * BLOCK + BLOCK, out.size), LANES):
        out[i] = store_output(totals[i - shift])


def reduce_kernel(words, codes, size, ranks, out_words, out_codes, counts, scale, n, seed_low, seed_high):
    totals = cuda.shared.array(SUMMED, np.float32)
    warp, lane = cuda.threadIdx.y, cuda.threadIdx.x
    block = cuda.blockIdx.x * WARPS + warp
    shift = (block - warp) * BLOCK
    sum_block(totals, shift, words, codes, size, ranks, n, scale, lane, block)
    encode_block(totals, shift, out_words, out_codes, counts, n, seed_low, seed_high, warp, lane, block)


def apply_source(update: ElementwiseRule, scalars: int, position: int) -> str:
    """The text of the kernel that decodes and applies a rule of this number of arguments."""
    others = [i for i in range(update.arrays) if i != position]
    arguments = ", ".join([f"a{i}" for i in others] + [f"s{i}" for i in range(scalars)])
    lines = [
        f"def apply_kernel(words, codes, size, ranks, {arguments}, scale, n):",
        "    totals = cuda.shared.array(SUMMED, np.float32)",
        "    warp, lane = cuda.threadIdx.y, cuda.threadIdx.x",
        "    block = cuda.blockIdx.x * WARPS + warp",
        "    shift = (block - warp) * BLOCK",
        "    sum_block(totals, shift, words, codes, size, ranks, n, scale, lane, block)",
        "    for i in range(block * BLOCK + lane, min(block * BLOCK + BLOCK, n), LANES):",
        f"        v{position} = totals[i - shift]",
    ]
    lines += [f"        v{i} = load_{i}(a{i}[i])" for i in others]
    lines += [f"        {call_lines(update, scalars)}"]
    lines += [f"        a{i}[i] = store_{i}(r{i})" for i in update.writes]
    return "\n".join(lines) + "\n"


TEMPLATES = {
    "encode": encode_kernel,
    "feedback": feedback_kernel,
    "decode": decode_kernel,
    "decode_sum": decode_sum_kernel,
    "reduce": reduce_kernel,
}
# Kernels that quantize what they have summed up themselves, in float32, whatever they read or write.
INTERMEDIATE = ("feedback", "decode_sum", "reduce")


def warps(block: int) -> int:
    """Warps of a thread block: 4, or fewer if their blocks' sums and summands would not fit into 32 KiB of shared memory."""
    return min(4, 4096 // block)


@functools.cache
def bound(
    rule: BlockQuantizer,
    block: int,
    inner: torch.dtype,
    outer: torch.dtype,
    stochastic: bool,
    given: bool,
    counted: bool = False,
) -> dict[str, Any]:
    """What the names in the templates stand for, for blocks of one dtype inside and vectors of another outside."""
    layout = Layout(0, block, rule.words, rule.bits)
    bindings: dict[str, Any] = {
        "BLOCK": block,
        "STRIDE": layout.stride,
        "WARPS": warps(block),
        "SUMMED": warps(block) * block,
        "STOCHASTIC": stochastic,
        "GIVEN": given,
        "COUNTED": counted,
        "load": LOAD[inner],
        "store": STORE[inner],
        "load_input": LOAD[outer],
        "store_output": STORE[outer],
        "add": add,
        "multiplied": multiplied,
        **rule_constants(rule),
        **rule_bindings(rule),
    }
    for function in (tree_sum, block_sum, extremes_of, code_at, decoded, own_stop, encode_block, sum_block):
        bindings[function.__name__] = compile_template(function, bindings, device=True)
    return bindings


@functools.cache
def kernel(
    name: str,
    rule: BlockQuantizer,
    block: int,
    dtype: torch.dtype,
    stochastic: bool = False,
    given: bool = False,
    counted: bool = False,
) -> Any:
    """The compiled kernel."""
    inner = torch.float32 if name in INTERMEDIATE else dtype
    return compile_template(TEMPLATES[name], bound(rule, block, inner, dtype, stochastic, given, counted))


@functools.cache
def apply_kernel(
    rule: BlockQuantizer,
    block: int,
    update: ElementwiseRule,
    scalars: int,
    position: int,
    dtypes: tuple[torch.dtype, ...],
) -> Any:
    """The compiled kernel that decodes and applies a rule."""
    bindings = bound(rule, block, torch.float32, torch.float32, False, False) | {"rule": update.function}
    others = [i for i in range(update.arrays) if i != position]
    for i, dtype in zip(others, dtypes, strict=True):
        bindings |= {f"load_{i}": LOAD[dtype], f"store_{i}": STORE[dtype]}
    names = {"__name__": __name__, "cuda": cuda, "np": np, "LANES": LANES}
    return compile_template(
        function_from_source(apply_source(update, scalars, position), "apply_kernel", names), bindings
    )


def launch(kernel: Any, layout: Layout, *tensors_and_scalars: Any) -> None:
    """Launches one warp for each block."""
    first = next(t for t in tensors_and_scalars if isinstance(t, torch.Tensor))
    height = warps(layout.block)
    with launching(first) as stream:
        arguments = [array(a) if isinstance(a, torch.Tensor) else a for a in tensors_and_scalars]
        kernel[-(-layout.blocks // height), (LANES, height), stream](*arguments)


@functools.cache
def no_counts(device: torch.device) -> torch.Tensor:
    """What a kernel without counts gets and does not read: memory of its own, since the simulator writes arguments back."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def counted(counts: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """The counts, or what stands for none."""
    return no_counts(device) if counts is None else counts


def flat_parts(payloads: torch.Tensor, layout: Layout, first: int = 0) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Contiguous views from a block's first scale and from its first code to the end, then the payloads' distance and number."""
    ranks, size = payloads.shape
    stride = payloads.stride(0)
    flat = payloads.as_strided((stride * (ranks - 1) + size if ranks else 0,), (1,))
    scales, codes = flat.view(torch.int32)[layout.words * first :], flat[layout.scale_bytes + first * layout.stride :]
    return scales, codes, stride, ranks


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
    run = kernel("encode", rule, layout.block, x.dtype, seed is not None, given, counts is not None)
    arguments = (x, *layout.parts(payload), counted(counts, x.device), layout.n, *seed_halves(seed))
    launch(run, layout, *arguments)


def encode_pieces(
    rule: BlockQuantizer, pieces: Sequence[torch.Tensor], payload: torch.Tensor, layout: Layout, seed: int | None
) -> None:
    """See `bagua_kernels.launchers.blockwise.encode_pieces`.

    The simulator has no addresses, so the pieces are laid out in a buffer first; the Triton backend has no such copy.
    """
    flat = torch.zeros(layout.n, dtype=pieces[0].dtype, device=payload.device)
    counts = torch.full((layout.blocks,), layout.block, dtype=torch.int32)
    start = 0
    for piece in pieces:
        flat[start : start + piece.numel()] = piece
        start += padded(piece.numel(), layout.block)
        if piece.numel() % layout.block:
            counts[start // layout.block - 1] = piece.numel() % layout.block
    encode(rule, flat, payload, layout, seed, False, counts.to(payload.device))


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
    run = kernel("feedback", rule, layout.block, x.dtype, seed is not None, counted=counts is not None)
    arguments = (x, residual, *layout.parts(payload), counted(counts, x.device), layout.n, np.float32(factor))
    launch(run, layout, *arguments, *seed_halves(seed))


def decode(rule: BlockQuantizer, payload: torch.Tensor, out: torch.Tensor, layout: Layout) -> None:
    """See `bagua_kernels.launchers.blockwise.decode`."""
    launch(kernel("decode", rule, layout.block, out.dtype), layout, *layout.parts(payload), out)


def decode_sum(rule: BlockQuantizer, payloads: torch.Tensor, out: torch.Tensor, scale: float, layout: Layout) -> None:
    """See `bagua_kernels.launchers.blockwise.decode_sum`."""
    run = kernel("decode_sum", rule, layout.block, out.dtype)
    launch(run, layout, *flat_parts(payloads, layout), out, np.float32(scale))


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
    run = apply_kernel(rule, layout.block, update, len(scalars), position, tuple(a.dtype for a in arrays))
    numbers = map(np.float32, scalars)
    launch(run, layout, *flat_parts(payloads, whole, first), *arrays, *numbers, np.float32(scale), layout.n)


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
    run = kernel("reduce", rule, layout.block, torch.float32, seed is not None, counted=counts is not None)
    arguments = (*flat_parts(payloads, layout), *layout.parts(out), counted(counts, out.device))
    launch(run, layout, *arguments, np.float32(scale), layout.n, *seed_halves(seed))
