"""Block quantizers on the CPU: kernels over a range of blocks, one after the other.

Each function is a template, see `_numba_cpu_block`. Two things decide the speed besides vectorised loops. Memory is asked for
some blocks ahead, since the passes over a block make its reading and its arithmetic take turns. And arrays are `borrowed` and
divided by `part` and `row`: a block takes a dozen slices, each of which would count references atomically.
"""

from __future__ import annotations

import numpy as np

from bagua_kernels.jit._numba_cpu_intrinsics import as_bytes, borrowed, keep, part, row, store_fence, wide_vectors
from bagua_kernels.jit._numba_cpu_sharing import shared
from bagua_kernels.rules.calls import Rule


def encode_blocks(x, words, codes, counts, seed_low, seed_high, begin, end, threads, launcher):
    if shared(begin, end, threads, launcher):
        return
    wide_vectors()
    x, words, codes, counts = borrowed(x), borrowed(words), borrowed(codes), borrowed(counts)
    own = np.empty((ROWS, BLOCK), np.float32)
    scratch = borrowed(own)
    for block in range(begin, end):
        start = block * BLOCK
        ask_for(x, start, BLOCK)
        ask_for(codes, block * STRIDE, STRIDE)
        values = part(x, start, start + own_size(counts, block, min(BLOCK, x.size - start)))
        here = part(codes, block * STRIDE, min((block + 1) * STRIDE, codes.size))
        encode_block(values, words, here, scratch, block, start, seed_low, seed_high)
    keep(own)


def encode_pieces_blocks(addresses, sizes, firsts, words, codes, seed_low, seed_high, begin, end, threads, launcher):
    """Piece p has `sizes[p]` elements at an address, and blocks from `firsts[p]` up to `firsts[p + 1]`."""
    if shared(begin, end, threads, launcher):
        return
    wide_vectors()
    words, codes = borrowed(words), borrowed(codes)
    own = np.empty((ROWS + 1, BLOCK), np.float32)
    scratch = borrowed(own)
    padded_block = row(scratch, ROWS)
    piece = 0
    for block in range(begin, end):
        while block >= firsts[piece + 1]:
            piece += 1
        x = vector(addresses[piece], sizes[piece])
        start = (block - firsts[piece]) * BLOCK
        ask_for(x, start, BLOCK)
        values = part(x, start, min(start + BLOCK, x.size))
        for i in range(values.size):
            padded_block[i] = load_input(values[i])
        here = part(codes, block * STRIDE, (block + 1) * STRIDE)
        padded = part(padded_block, 0, values.size)
        encode_block(padded, words, here, scratch, block, block * BLOCK, seed_low, seed_high)
    keep(own)


def decode_blocks(words, codes, out, begin, end, threads, launcher):
    if shared(begin, end, threads, launcher):
        return
    wide_vectors()
    words, codes, out = borrowed(words), borrowed(codes), borrowed(out)
    own = np.empty((2, BLOCK), out.dtype)
    scratch = borrowed(own)
    decoded, loose = row(scratch, 0), as_bytes(row(scratch, 1))
    streamed = is_streamed(out)
    for block in range(begin, end):
        start = block * BLOCK
        here = part(codes, block * STRIDE, min((block + 1) * STRIDE, codes.size))
        target = part(out, start, min(start + BLOCK, out.size))
        values = part(decoded, 0, target.size) if streamed else target
        decode_block(words, here, values, loose, block)
        if streamed:
            stream_block(values, target)
    if streamed:
        store_fence()
    keep(own)


def decode_sum_blocks(words, codes, weights, out, divisor, scale, begin, end, threads, launcher):
    if shared(begin, end, threads, launcher):
        return
    wide_vectors()
    words, codes, weights, out = borrowed(words), borrowed(codes), borrowed(weights), borrowed(out)
    own = np.empty((3, BLOCK), np.float32)
    scratch = borrowed(own)
    totals, rounded, loose = row(scratch, 0), as_output(row(scratch, 1)), as_bytes(row(scratch, 2))
    streamed = is_streamed(out)
    for block in range(begin, end):
        start = block * BLOCK
        target = part(out, start, min(start + BLOCK, out.size))
        total = part(totals, 0, target.size)
        # There are no replicas, and any matrix stands for them.
        sum_block(words, codes, weights, scratch, start, total, loose, divisor, scale, block)
        values = part(rounded, 0, target.size) if streamed else target
        for i in range(target.size):
            values[i] = store_output(total[i])
        if streamed:
            stream_block(values, target)
    if streamed:
        store_fence()
    keep(own)


def reduce_blocks(
    words, codes, weights, out_words, out_codes, counts, scale, n, seed_low, seed_high, begin, end, threads, launcher
):
    if shared(begin, end, threads, launcher):
        return
    wide_vectors()
    words, codes, out_words, out_codes = borrowed(words), borrowed(codes), borrowed(out_words), borrowed(out_codes)
    weights, counts = borrowed(weights), borrowed(counts)
    own = np.empty((ROWS + 2, BLOCK), np.float32)
    scratch = borrowed(own)
    totals, loose = row(scratch, ROWS + 1), as_bytes(row(scratch, ROWS))
    for block in range(begin, end):
        start = block * BLOCK
        total = part(totals, 0, own_size(counts, block, min(BLOCK, n - start)))
        ask_for(out_codes, block * STRIDE, STRIDE)
        # There are no replicas, and any matrix stands for them.
        sum_block(words, codes, weights, scratch, start, total, loose, scale, scale, block)
        here = part(out_codes, block * STRIDE, min((block + 1) * STRIDE, out_codes.size))
        encode_block(total, out_words, here, scratch, block, start, seed_low, seed_high)
    keep(own)


def encode_rows_blocks(x, words, codes, counts, seeds, span, width, begin, end, threads, launcher):
    """Row r of the matrices is the payload of `width` elements from `r * span` on; blocks are counted through all rows."""
    if shared(begin, end, threads, launcher):
        return
    wide_vectors()
    x, words, codes, counts = borrowed(x), borrowed(words), borrowed(codes), borrowed(counts)
    own = np.empty((ROWS, BLOCK), np.float32)
    scratch = borrowed(own)
    blocks = (width + BLOCK - 1) // BLOCK
    for number in range(begin, end):
        rank = number // blocks
        block = number - rank * blocks
        start = block * BLOCK
        first = rank * span + start
        row_codes = row(codes, rank)
        ask_for(x, first, BLOCK)
        ask_for(row_codes, block * STRIDE, STRIDE)
        values = part(x, first, first + own_size(counts, first // BLOCK, min(BLOCK, width - start)))
        here = part(row_codes, block * STRIDE, min((block + 1) * STRIDE, row_codes.size))
        encode_block(values, row(words, rank), here, scratch, block, start, seeds[rank, 0], seeds[rank, 1])
    keep(own)


def encode_pieces_rows_blocks(addresses, sizes, firsts, words, codes, seeds, blocks, begin, end, threads, launcher):
    """As `encode_pieces_blocks`, with `blocks` blocks in each row; a piece lies in one row."""
    if shared(begin, end, threads, launcher):
        return
    wide_vectors()
    words, codes = borrowed(words), borrowed(codes)
    own = np.empty((ROWS + 1, BLOCK), np.float32)
    scratch = borrowed(own)
    padded_block = row(scratch, ROWS)
    piece = 0
    for number in range(begin, end):
        while number >= firsts[piece + 1]:
            piece += 1
        x = vector(addresses[piece], sizes[piece])
        start = (number - firsts[piece]) * BLOCK
        ask_for(x, start, BLOCK)
        values = part(x, start, min(start + BLOCK, x.size))
        for i in range(values.size):
            padded_block[i] = load_input(values[i])
        rank = number // blocks
        block = number - rank * blocks
        here = part(row(codes, rank), block * STRIDE, (block + 1) * STRIDE)
        padded = part(padded_block, 0, values.size)
        low, high = seeds[rank, 0], seeds[rank, 1]
        encode_block(padded, row(words, rank), here, scratch, block, block * BLOCK, low, high)
    keep(own)


def decode_rows_blocks(words, codes, out, span, width, begin, end, threads, launcher):
    if shared(begin, end, threads, launcher):
        return
    wide_vectors()
    words, codes, out = borrowed(words), borrowed(codes), borrowed(out)
    own = np.empty((2, BLOCK), out.dtype)
    scratch = borrowed(own)
    decoded, loose = row(scratch, 0), as_bytes(row(scratch, 1))
    streamed = is_streamed(out)
    blocks = (width + BLOCK - 1) // BLOCK
    for number in range(begin, end):
        rank = number // blocks
        block = number - rank * blocks
        start = block * BLOCK
        row_codes = row(codes, rank)
        here = part(row_codes, block * STRIDE, min((block + 1) * STRIDE, row_codes.size))
        first = rank * span + start
        target = part(out, first, first + min(BLOCK, width - start))
        values = part(decoded, 0, target.size) if streamed else target
        decode_block(row(words, rank), here, values, loose, block)
        if streamed:
            stream_block(values, target)
    if streamed:
        store_fence()
    keep(own)


TEMPLATES: dict[str, Rule] = {
    "encode": encode_blocks,
    "encode_pieces": encode_pieces_blocks,
    "decode": decode_blocks,
    "decode_sum": decode_sum_blocks,
    "reduce": reduce_blocks,
    "encode_rows": encode_rows_blocks,
    "encode_pieces_rows": encode_pieces_rows_blocks,
    "decode_rows": decode_rows_blocks,
}
