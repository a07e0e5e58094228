"""Block quantizers in Triton: a program takes a tile of ROWS blocks, a row a block.

R rows of a tile, B elements of a block; `b_` a per-row value [R, 1], others [R, B] unless said.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from bagua_kernels.jit._triton import EXACT, LOAD, STORE, bits, compile_template, on_device, signed
from bagua_kernels.launchers.blockwise import Layout, rule_bindings, seed_halves
from bagua_kernels.rules.quantizers import BlockQuantizer


def encode_tile(x, words_ptr, codes_ptr, n, rows, offsets, inside, seed_low, seed_high, STOCHASTIC: tl.constexpr):
    """Encodes a tile of float32 values and stores its scales and codes, zeroing the pads that fall into it."""
    WORDS: tl.constexpr = N_WORDS
    keys = ordered(float_bits(x))
    low = tl.min(tl.where(inside, keys, 0x7FFFFFFF), axis=1)
    high = tl.max(tl.where(inside, keys, -0x80000000), axis=1)
    first, second = scales(low, high)
    blocks = tl.cdiv(n, offsets.shape[1])
    padded_rows = tl.cdiv(blocks * WORDS, 4) * 4 // WORDS
    stored = rows < padded_rows
    tl.store(words_ptr + rows * WORDS, tl.where(rows < blocks, first, 0), mask=stored)
    if WORDS == 2:
        tl.store(words_ptr + rows * WORDS + 1, tl.where(rows < blocks, second, 0), mask=stored)
    b_a, b_b, b_c, b_d = encode_constants(first[:, None], second[:, None])
    if STOCHASTIC:
        index_high = tl.cast(offsets >> 32, tl.uint32)
        key, second_key = random_key(tl.cast(seed_low, tl.uint32), tl.cast(seed_high, tl.uint32), index_high)
        noise = dither(random_bits(tl.cast(offsets, tl.uint32), key, second_key))
        codes = encode(x, b_a, b_b, b_c, b_d, noise)
    else:
        codes = encode(x, b_a, b_b, b_c, b_d, 0.0)
    padded = tl.cdiv(n, 16) * 16
    tl.store(codes_ptr + offsets, tl.cast(tl.where(inside, codes, 0), tl.uint8), mask=offsets < padded)


def encode_kernel(
    x_ptr, words_ptr, codes_ptr, n, seed_low, seed_high,
    STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = offsets < n
    x = load(tl.load(x_ptr + offsets, mask=inside, other=0))
    encode_tile(x, words_ptr, codes_ptr, n, rows, offsets, inside, seed_low, seed_high, STOCHASTIC)


def decoded_sum(words_ptr, codes_ptr, ranks, size, n, scale, rows, offsets, inside):
    """Decodes the tile of every payload, `size` bytes apart, and returns `scale` times the sum, taken in rank order."""
    WORDS: tl.constexpr = N_WORDS
    total = tl.zeros(offsets.shape, tl.float32)
    present = rows < tl.cdiv(n, offsets.shape[1])
    for rank in range(ranks):
        at = tl.cast(rank, tl.int64) * size
        word_ptrs = words_ptr + at // 4 + rows * WORDS
        first = tl.load(word_ptrs, mask=present, other=0)
        second = tl.load(word_ptrs + WORDS - 1, mask=present, other=0)
        b_a, b_b, b_c, b_d = decode_constants(first[:, None], second[:, None])
        codes = tl.load(codes_ptr + at + offsets, mask=inside, other=0)
        total += decode(tl.cast(codes, tl.int32), b_a, b_b, b_c, b_d)
    return total * scale


def decode_kernel(words_ptr, codes_ptr, out_ptr, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    WORDS: tl.constexpr = N_WORDS
    rows = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = offsets < n
    present = rows < tl.cdiv(n, BLOCK)
    first = tl.load(words_ptr + rows * WORDS, mask=present, other=0)
    second = tl.load(words_ptr + rows * WORDS + WORDS - 1, mask=present, other=0)
    b_a, b_b, b_c, b_d = decode_constants(first[:, None], second[:, None])
    codes = tl.load(codes_ptr + offsets, mask=inside, other=0)
    tl.store(out_ptr + offsets, store(decode(tl.cast(codes, tl.int32), b_a, b_b, b_c, b_d)), mask=inside)


def decode_sum_kernel(
    words_ptr, codes_ptr, out_ptr, ranks, size, n, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    rows = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = offsets < n
    total = decoded_sum(words_ptr, codes_ptr, ranks, size, n, scale, rows, offsets, inside)
    tl.store(out_ptr + offsets, store(total), mask=inside)


def reduce_kernel(
    words_ptr, codes_ptr, out_words_ptr, out_codes_ptr, ranks, size, n, scale, seed_low, seed_high,
    STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = offsets < n
    total = decoded_sum(words_ptr, codes_ptr, ranks, size, n, scale, rows, offsets, inside)
    encode_tile(total, out_words_ptr, out_codes_ptr, n, rows, offsets, inside, seed_low, seed_high, STOCHASTIC)


TEMPLATES = {
    "encode": encode_kernel,
    "decode": decode_kernel,
    "decode_sum": decode_sum_kernel,
    "reduce": reduce_kernel,
}
UNSPECIALIZED = {
    "encode": ("seed_low", "seed_high"),
    "decode": (),
    "decode_sum": ("scale",),
    "reduce": ("scale", "seed_low", "seed_high"),
}


@functools.cache
def kernel(name: str, rule: BlockQuantizer, dtype: torch.dtype) -> Any:
    """The compiled kernel; Triton specialises it further by its constexpr arguments."""
    bindings: dict[str, Any] = {
        "N_WORDS": tl.constexpr(rule.words),
        "load": LOAD[dtype],
        "store": STORE[dtype],
        **rule_bindings(rule),
    }
    inner = {f.__name__: compile_template(f, bindings) for f in (encode_tile, decoded_sum)}
    return compile_template(TEMPLATES[name], {**bindings, **inner}, UNSPECIALIZED[name])


def tile(block: int) -> dict[str, int]:
    """The tile's rows and the warps for it; rows are a multiple of 4, so that the scales' pad falls into a tile."""
    rows = max(4, 4096 // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": 4 if rows * block <= 4096 else 8}


def launch(name: str, rule: BlockQuantizer, dtype: torch.dtype, layout: Layout, device: torch.Tensor, *arguments: Any,
           **constants: Any) -> None:  # fmt: skip
    """Launches one program for each tile of blocks."""
    shape = tile(layout.block)
    with on_device(device):
        grid = (triton.cdiv(layout.blocks, shape["ROWS"]),)
        kernel(name, rule, dtype)[grid](*arguments, **constants, **shape, **EXACT)


def encode(rule: BlockQuantizer, x: torch.Tensor, payload: torch.Tensor, layout: Layout, seed: int | None) -> None:
    """See `bagua_kernels.launchers.blockwise.encode`."""
    arguments = (bits(x), *layout.parts(payload), layout.n, *map(signed, seed_halves(seed)))
    launch("encode", rule, x.dtype, layout, x, *arguments, STOCHASTIC=seed is not None)


def decode(rule: BlockQuantizer, payload: torch.Tensor, out: torch.Tensor, layout: Layout) -> None:
    """See `bagua_kernels.launchers.blockwise.decode`."""
    launch("decode", rule, out.dtype, layout, out, *layout.parts(payload), bits(out), layout.n)


def decode_sum(rule: BlockQuantizer, payloads: torch.Tensor, out: torch.Tensor, scale: float, layout: Layout) -> None:
    """See `bagua_kernels.launchers.blockwise.decode_sum`."""
    arguments = (*layout.parts(payloads), bits(out), payloads.shape[0], layout.size, layout.n, scale)
    launch("decode_sum", rule, out.dtype, layout, out, *arguments)


def reduce(
    rule: BlockQuantizer, payloads: torch.Tensor, out: torch.Tensor, scale: float, layout: Layout, seed: int | None
) -> None:
    """See `bagua_kernels.launchers.blockwise.reduce`."""
    parts = (*layout.parts(payloads), *layout.parts(out))
    arguments = (*parts, payloads.shape[0], layout.size, layout.n, scale, *map(signed, seed_halves(seed)))
    launch("reduce", rule, torch.float32, layout, out, *arguments, STOCHASTIC=seed is not None)
