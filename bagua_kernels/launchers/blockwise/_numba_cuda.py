"""Block quantizers in Numba-CUDA: a warp takes a block, a lane every 32nd element of it.

The range of a block is found by atomic minima and maxima of integers in shared memory: exact in any order, fast in
hardware, and known to the simulator, which has no warp shuffles. Kernels do no float arithmetic of their own: only rules
are compiled without contraction.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import cuda

from bagua_kernels.jit._numba_cuda import LOAD, STORE, array, compile_template, launching
from bagua_kernels.launchers.blockwise import Layout, rule_bindings, seed_halves
from bagua_kernels.rules.quantizers import BlockQuantizer

LANES = 32


def add(total, value):
    """The sum of two float32."""
    return total + value


def scaled(total, scale):
    """The product of two float32."""
    return total * scale


def encode_block(values, shift, words, codes, n, seed_low, seed_high, warp, lane, block):
    """Encodes elements of one block, found in `values` at their index less `shift`; every thread must call it."""
    ranges = cuda.shared.array((WARPS, 2), np.int32)
    start = block * BLOCK
    stop = min(start + BLOCK, n)
    low = np.int32(0x7FFFFFFF)
    high = np.int32(-0x80000000)
    if lane == 0:
        ranges[warp, 0] = low
        ranges[warp, 1] = high
    cuda.syncthreads()
    for i in range(start + lane, stop, LANES):
        order = ordered(float_bits(load(values[i - shift])))
        low = min(low, order)
        high = max(high, order)
    cuda.atomic.min(ranges, (warp, 0), low)
    cuda.atomic.max(ranges, (warp, 1), high)
    cuda.syncthreads()
    if start < n:
        first, second = scales(ranges[warp, 0], ranges[warp, 1])
        if lane == 0:
            words[block * WORDS] = first
            if WORDS == 2:
                words[block * WORDS + 1] = second
        a, b, c, d = encode_constants(first, second)
        key, second_key = random_key(np.uint32(seed_low), np.uint32(seed_high), np.uint32(start >> 32))
        for i in range(start + lane, stop, LANES):
            noise = np.float32(0.0)
            if STOCHASTIC:
                noise = dither(random_bits(np.uint32(i), key, second_key))
            codes[i] = encode(load(values[i - shift]), a, b, c, d, noise)
    # The warp of the last block also zeroes the bytes after the scales and after the codes, 15 at the most.
    if start < n and stop == n:
        if n + lane < codes.size:
            codes[n + lane] = 0
        if (block + 1) * WORDS + lane < words.size:
            words[(block + 1) * WORDS + lane] = 0


def encode_kernel(x, words, codes, n, seed_low, seed_high):
    warp, lane = cuda.threadIdx.y, cuda.threadIdx.x
    encode_block(x, 0, words, codes, n, seed_low, seed_high, warp, lane, cuda.blockIdx.x * WARPS + warp)


def decode_kernel(words, codes, out):
    block = cuda.blockIdx.x * WARPS + cuda.threadIdx.y
    start = block * BLOCK
    if start < out.size:
        a, b, c, d = decode_constants(words[block * WORDS], words[block * WORDS + WORDS - 1])
        for i in range(start + cuda.threadIdx.x, min(start + BLOCK, out.size), LANES):
            out[i] = store(decode(np.int32(codes[i]), a, b, c, d))


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
            a, b, c, d = decode_constants(words[at], words[at + WORDS - 1])
            for i in range(start + lane, stop, LANES):
                totals[i - shift] = add(totals[i - shift], decode(np.int32(codes[rank * size + i]), a, b, c, d))
        for i in range(start + lane, stop, LANES):
            totals[i - shift] = scaled(totals[i - shift], scale)


def decode_sum_kernel(words, codes, size, ranks, out, scale):
    totals = cuda.shared.array(SUMS, np.float32)
    warp, lane = cuda.threadIdx.y, cuda.threadIdx.x
    block = cuda.blockIdx.x * WARPS + warp
    shift = (block - warp) * BLOCK
    sum_block(totals, shift, words, codes, size, ranks, out.size, scale, lane, block)
    for i in range(block * BLOCK + lane, min(block * BLOCK + BLOCK, out.size), LANES):
        out[i] = store(totals[i - shift])


def reduce_kernel(words, codes, size, ranks, out_words, out_codes, scale, n, seed_low, seed_high):
    totals = cuda.shared.array(SUMS, np.float32)
    warp, lane = cuda.threadIdx.y, cuda.threadIdx.x
    block = cuda.blockIdx.x * WARPS + warp
    shift = (block - warp) * BLOCK
    sum_block(totals, shift, words, codes, size, ranks, n, scale, lane, block)
    encode_block(totals, shift, out_words, out_codes, n, seed_low, seed_high, warp, lane, block)


TEMPLATES = {
    "encode": encode_kernel,
    "decode": decode_kernel,
    "decode_sum": decode_sum_kernel,
    "reduce": reduce_kernel,
}


def warps(block: int) -> int:
    """Warps of a thread block: 4, or fewer if their blocks' sums would not fit into 32 KiB of shared memory."""
    return min(4, 8192 // block)


@functools.cache
def kernel(name: str, rule: BlockQuantizer, block: int, dtype: torch.dtype, stochastic: bool) -> Any:
    """The compiled kernel."""
    bindings: dict[str, Any] = {
        "BLOCK": block,
        "WARPS": warps(block),
        "SUMS": warps(block) * block,
        "WORDS": rule.words,
        "STOCHASTIC": stochastic,
        "load": LOAD[dtype],
        "store": STORE[dtype],
        "add": add,
        "scaled": scaled,
        **rule_bindings(rule),
    }
    inner = {f.__name__: compile_template(f, bindings, device=True) for f in (encode_block, sum_block)}
    return compile_template(TEMPLATES[name], {**bindings, **inner})


def launch(
    name: str, rule: BlockQuantizer, dtype: torch.dtype, seed: int | None, layout: Layout, *tensors_and_scalars: Any
) -> None:
    """Launches one warp for each block."""
    first = next(t for t in tensors_and_scalars if isinstance(t, torch.Tensor))
    height = warps(layout.block)
    with launching(first) as stream:
        arguments = [array(a) if isinstance(a, torch.Tensor) else a for a in tensors_and_scalars]
        grid = -(-layout.blocks // height)
        kernel(name, rule, layout.block, dtype, seed is not None)[grid, (LANES, height), stream](*arguments)


def flat_parts(payloads: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Contiguous views from the first scale and from the first code to the end, then a payload's size and their number."""
    flat = payloads.view(-1)
    return flat.view(torch.int32), flat[layout.scale_bytes :], layout.size, payloads.shape[0]


def encode(rule: BlockQuantizer, x: torch.Tensor, payload: torch.Tensor, layout: Layout, seed: int | None) -> None:
    """See `bagua_kernels.launchers.blockwise.encode`."""
    launch("encode", rule, x.dtype, seed, layout, x, *layout.parts(payload), layout.n, *seed_halves(seed))


def decode(rule: BlockQuantizer, payload: torch.Tensor, out: torch.Tensor, layout: Layout) -> None:
    """See `bagua_kernels.launchers.blockwise.decode`."""
    launch("decode", rule, out.dtype, None, layout, *layout.parts(payload), out)


def decode_sum(rule: BlockQuantizer, payloads: torch.Tensor, out: torch.Tensor, scale: float, layout: Layout) -> None:
    """See `bagua_kernels.launchers.blockwise.decode_sum`."""
    launch("decode_sum", rule, out.dtype, None, layout, *flat_parts(payloads, layout), out, np.float32(scale))


def reduce(
    rule: BlockQuantizer, payloads: torch.Tensor, out: torch.Tensor, scale: float, layout: Layout, seed: int | None
) -> None:
    """See `bagua_kernels.launchers.blockwise.reduce`."""
    arguments = (*flat_parts(payloads, layout), *layout.parts(out), np.float32(scale), layout.n, *seed_halves(seed))
    launch("reduce", rule, torch.float32, seed, layout, *arguments)
