"""What block quantizers do with one block on the CPU.

Each function is a template: its upper-case names and rule names are bound when a kernel is made, see `_numba_cpu`. A block is
made a `part` of its vector before its loop. Inside `range(size)` over a part Numba needs no negative-index check, and LLVM
vectorises the loop. This reaches 80 instead of 5 per cent of the copy rate.
"""

from __future__ import annotations

import numpy as np

from bagua_kernels.jit._numba_cpu_intrinsics import (
    VECTOR_BYTES,
    as_bytes,
    as_int32,
    part,
    prefetch,
    row,
    stream_vector,
    wide_vectors,
)
from bagua_kernels.rules.calls import Rule

# How far ahead of the block at work memory is asked for, and how much a cache line holds.
AHEAD_BYTES = 4096
LINE_BYTES = 64
# Beyond the size of a core's own cache a vector that is written is not there any more when it is read.
STREAMED_BYTES = 1 << 22


def range_of(values):
    """The least and greatest key, from three extremes of the bits, which cost less than a key of each element.

    Negative floats compare as unsigned integers do, in reverse; others as signed ones.
    """
    wide_vectors()
    least = np.uint32(0xFFFFFFFF)
    greatest = np.uint32(0)
    signed = np.int32(-0x80000000)
    for i in range(values.size):
        bits = np.int32(float_bits(load(values[i])))
        least = min(least, np.uint32(bits))
        greatest = max(greatest, np.uint32(bits))
        signed = max(signed, bits)
    low = np.int32(greatest) if np.int32(greatest) < 0 else np.int32(least)
    high = signed if signed >= 0 else np.int32(least)
    return np.int32(ordered(low)), np.int32(ordered(high))


def magnitude_of(values):
    wide_vectors()
    high = np.int32(0)
    for i in range(values.size):
        high = max(high, np.int32(float_bits(load(values[i])) & np.int32(0x7FFFFFFF)))
    return np.int32(0), high


def clear(elements, begin):
    """Zeroes the elements from `begin` on."""
    for i in range(begin, elements.size):
        elements[i] = 0


def tree_sum(numbers):
    """Adds up BLOCK numbers in the order that the wire format fixes; they are used up."""
    half = BLOCK // 2
    while half > 0:
        left, right = part(numbers, 0, half), part(numbers, half, 2 * half)
        for i in range(half):
            left[i] += right[i]
        half //= 2
    return numbers[0]


def block_sums(values, scratch, unit_of_block):
    wide_vectors()
    first = row(scratch, 0)
    for i in range(values.size):
        first[i] = terms(load(values[i]), unit_of_block)[0]
    clear(first, values.size)
    if SUMS == 1:
        return tree_sum(first), np.float32(0), np.float32(0)
    second = row(scratch, 1)
    for i in range(values.size):
        second[i] = terms(load(values[i]), unit_of_block)[1]
    clear(second, values.size)
    third = row(scratch, 2)
    for i in range(values.size):
        third[i] = terms(load(values[i]), unit_of_block)[2]
    clear(third, values.size)
    return tree_sum(first), tree_sum(second), tree_sum(third)


def side_sums(values, scratch, unit_of_block):
    """The sums of both sides of a block, and the number of elements in the upper one, after all splits."""
    wide_vectors()
    steps_of = part(as_int32(row(scratch, 0)), 0, values.size)
    total = np.int32(0)
    for i in range(values.size):
        steps_of[i] = steps(load(values[i]), unit_of_block, np.int32(LEVELS))
        total = np.int32(total + steps_of[i])
    count = np.float32(max(values.size, 1))
    upper, many = total, np.int32(values.size)
    for _ in range(SPLITS):
        middle = threshold(np.float32(np.int32(total - upper)), np.float32(upper), np.float32(many), count)
        # Numba would make sums of 64 bits, of which a vector has half as many.
        upper, many = np.int32(0), np.int32(0)
        for i in range(steps_of.size):
            beyond = steps_of[i] > middle
            upper = np.int32(upper + (steps_of[i] if beyond else np.int32(0)))
            many = np.int32(many + np.int32(beyond))
    return np.float32(np.int32(total - upper)), np.float32(upper), np.float32(many)


def encode_codes(values, codes, a, b, c, d, start, seed_low, seed_high):
    """Writes a code a byte; the first element is number `start` of the vector."""
    wide_vectors()
    if STOCHASTIC:
        key, second_key = random_key(seed_low, seed_high, np.uint32(start >> 32))
        # A counter of its own, since one made from the 64-bit `i` would halve the number of lanes.
        index = np.uint32(start)
        for i in range(values.size):
            bits = random_bits(index, key, second_key)
            index = np.uint32(index + np.uint32(1))
            codes[i] = np.uint8(encode(load(values[i]), a, b, c, d, dither(bits), np.int32(LEVELS)) & np.int32(MASK))
    else:
        for i in range(values.size):
            # Adding -0 leaves every float as it is, so the compiler drops the addition.
            code = encode(load(values[i]), a, b, c, d, np.float32(-0.0), np.int32(LEVELS))
            codes[i] = np.uint8(code & np.int32(MASK))


def own_size(counts, block, size):
    """How many of the `size` elements that a block has in its vector are its own; all of them if there are no counts."""
    return size if counts.size == 0 else max(0, min(size, np.int64(counts[block])))


def encode_block(values, words, codes, scratch, block, start, seed_low, seed_high):
    """Encodes a block whose first element is number `start` of the vector; `codes` are the bytes of this block.

    `values` are the block's own elements, of which there may be none: that is a block of zeros. Other codes are 0.
    """
    if GIVEN:
        first, second = words[block * WORDS], words[block * WORDS + WORDS - 1]
    else:
        low, high = extremes_of(values)
        if values.size == 0:
            low = high = np.int32(0)
        if SUMS:
            sum0, sum1, sum2 = block_sums(values, scratch, unit(low, high))
        elif SPLITS:
            sum0, sum1, sum2 = side_sums(values, scratch, unit(low, high))
        else:
            sum0 = sum1 = sum2 = np.float32(0)
        first, second = scales(low, high, sum0, sum1, sum2, np.float32(max(values.size, 1)), np.int32(LEVELS))
        words[block * WORDS] = first
        if WORDS == 2:
            words[block * WORDS + 1] = second
    a, b, c, d = encode_constants(first, second, np.int32(LEVELS))
    if FIELDS == 1:
        encode_codes(values, codes, a, b, c, d, start, seed_low, seed_high)
        clear(codes, values.size)
    else:
        loose = part(as_bytes(row(scratch, 0)), 0, BLOCK)
        encode_codes(values, loose, a, b, c, d, start, seed_low, seed_high)
        clear(loose, values.size)
        pack(loose, codes)


def code_of(byte):
    """A code as an integer, with its sign if it has one."""
    code = np.int32(byte)
    if SIGNED:
        code = np.int32((code ^ np.int32(HALF)) - np.int32(HALF))
    return np.int32(code)


def decode_block(words, codes, target, loose, block):
    """Decodes a block into `target`; `codes` are the bytes of this block, `loose` has room for one byte per element."""
    wide_vectors()
    a, b, c, d = decode_constants(words[block * WORDS], words[block * WORDS + WORDS - 1], np.int32(LEVELS))
    if FIELDS > 1:
        unpack(codes, loose)
        codes = loose
    codes = part(codes, 0, target.size)
    for i in range(target.size):
        target[i] = store(decode(code_of(codes[i]), a, b, c, d, np.int32(LEVELS)))


def weighed(value, weight):
    """A decoded value times its payload's weight, or as it is in kernels without weights."""
    if WEIGHTED:
        return value * weight
    return value


def add_block(words, codes, weight, replica, total, fresh, factor, loose, block):
    """Adds a decoded block to `total`, or to zero if that is fresh, and multiplies by a factor.

    With replicas, the block without its weight is added to `replica`, too.
    """
    wide_vectors()
    a, b, c, d = decode_constants(words[block * WORDS], words[block * WORDS + WORDS - 1], np.int32(LEVELS))
    if FIELDS > 1:
        unpack(codes, loose)
        codes = loose
    codes = part(codes, 0, total.size)
    for i in range(total.size):
        before = np.float32(0.0) if fresh else total[i]
        value = decode(code_of(codes[i]), a, b, c, d, np.int32(LEVELS))
        if TRACKED:
            replica[i] += value
        total[i] = (before + weighed(value, weight)) * factor


def add_four_blocks(words, codes, weights, rank, begin, end, total, fresh, factor, loose, block):
    """As `add_block` for the block of four ranks from `rank` on: the same sums with a quarter of the traffic."""
    wide_vectors()
    at, last = block * WORDS, block * WORDS + WORDS - 1
    a0, b0, c0, d0 = decode_constants(words[rank, at], words[rank, last], np.int32(LEVELS))
    a1, b1, c1, d1 = decode_constants(words[rank + 1, at], words[rank + 1, last], np.int32(LEVELS))
    a2, b2, c2, d2 = decode_constants(words[rank + 2, at], words[rank + 2, last], np.int32(LEVELS))
    a3, b3, c3, d3 = decode_constants(words[rank + 3, at], words[rank + 3, last], np.int32(LEVELS))
    w0, w1, w2, w3 = weights[rank], weights[rank + 1], weights[rank + 2], weights[rank + 3]
    codes0, codes1 = part(row(codes, rank), begin, end), part(row(codes, rank + 1), begin, end)
    codes2, codes3 = part(row(codes, rank + 2), begin, end), part(row(codes, rank + 3), begin, end)
    if FIELDS > 1:
        loose0, loose1 = part(loose, 0, BLOCK), part(loose, BLOCK, 2 * BLOCK)
        loose2, loose3 = part(loose, 2 * BLOCK, 3 * BLOCK), part(loose, 3 * BLOCK, 4 * BLOCK)
        unpack(codes0, loose0)
        unpack(codes1, loose1)
        unpack(codes2, loose2)
        unpack(codes3, loose3)
        codes0, codes1, codes2, codes3 = loose0, loose1, loose2, loose3
    codes0, codes1 = part(codes0, 0, total.size), part(codes1, 0, total.size)
    codes2, codes3 = part(codes2, 0, total.size), part(codes3, 0, total.size)
    for i in range(total.size):
        before = np.float32(0.0) if fresh else total[i]
        first = before + weighed(decode(code_of(codes0[i]), a0, b0, c0, d0, np.int32(LEVELS)), w0)
        second = first + weighed(decode(code_of(codes1[i]), a1, b1, c1, d1, np.int32(LEVELS)), w1)
        third = second + weighed(decode(code_of(codes2[i]), a2, b2, c2, d2, np.int32(LEVELS)), w2)
        total[i] = (third + weighed(decode(code_of(codes3[i]), a3, b3, c3, d3, np.int32(LEVELS)), w3)) * factor


def ask_for(elements, start, size):
    """Prefetches the memory of `size` elements some way after `start`."""
    line = LINE_BYTES // elements.itemsize
    begin = start + AHEAD_BYTES // elements.itemsize
    for i in range(begin, begin + size, line):
        prefetch(elements, i)


def stream_block(source, target):
    """Copies a block to memory past the caches.

    Otherwise each line that is written is read first, which is almost half of what a decoder moves.
    """
    size = source.size * source.itemsize
    whole = size - size % VECTOR_BYTES
    for at in range(0, whole, VECTOR_BYTES):
        stream_vector(target, source, at)
    for i in range(whole // source.itemsize, source.size):
        target[i] = source[i]


def is_streamed(out):
    return out.size * out.itemsize >= STREAMED_BYTES and out.ctypes.data % VECTOR_BYTES == 0


def sum_block(words, codes, weights, replicas, start, total, loose, divisor, scale, block):
    """Sums up the block of all ranks, in their order; `loose` has room for four bytes per element.

    `start` is the number of the block's first element in the rows of `replicas`. The scale is a factor of the last sum. The
    factor of the others is 1, which changes no float and needs no extra pass. A sum that is divided gets one, in the cache.
    """
    begin = block * STRIDE
    end = min(begin + STRIDE, codes.shape[1])
    ranks = words.shape[0]
    if ranks == 0:
        clear(total, 0)
    for rank in range(ranks):
        ask_for(row(codes, rank), begin, STRIDE)
    one = np.float32(1.0)
    last = one if DIVIDED else scale
    fours = 0
    if FOURS:
        fours = ranks // 4 * 4
        for rank in range(0, fours, 4):
            factor = last if rank + 4 == ranks else one
            add_four_blocks(words, codes, weights, rank, begin, end, total, rank == 0, factor, loose, block)
    for rank in range(fours, ranks):
        factor = last if rank + 1 == ranks else one
        replica = total
        if TRACKED:
            ask_for(row(replicas, rank), start, BLOCK)
            replica = part(row(replicas, rank), start, start + total.size)
        here, bytes_here = part(row(codes, rank), begin, end), part(loose, 0, BLOCK)
        add_block(row(words, rank), here, weights[rank], replica, total, rank == 0, factor, bytes_here, block)
    if DIVIDED:
        for i in range(total.size):
            total[i] = quotient(total[i], divisor) * scale


# Templates in the order in which they are compiled: each may call those of the layers before.
LAYERS: tuple[tuple[Rule, ...], ...] = (
    (clear, tree_sum, code_of, weighed, own_size, ask_for, stream_block, is_streamed, side_sums, encode_codes),
    (block_sums, decode_block, add_block, add_four_blocks),
    (encode_block, sum_block),
)
EXTREMES: dict[str, Rule] = {"range": range_of, "magnitude": magnitude_of}
