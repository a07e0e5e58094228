"""Block quantizers in Numba-CUDA: a warp takes a block, a lane every 32nd element of it.

The extremes of a block are found by atomic minima and maxima of integers in shared memory, the sums of its sides by atomic
additions. These are exact in any order, fast in hardware, and known to the simulator, which has no warp shuffles. A lane packs
the codes of the elements of its own bytes, which are a stride apart. Lanes thus read neighbours, and no ballot is needed. Only
rules do float arithmetic.
"""

from __future__ import annotations

import numpy as np

from bagua_kernels.jit._numba_cuda_package import cuda

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


def beyond(values, shift, start, stop, unit_of_block, middle, warp, lane):
    """The sum of the steps that are more than `middle`, and how many elements have them; every thread must call it."""
    side = cuda.shared.array((WARPS, 2), np.int32)
    if lane == 0:
        side[warp, 0] = np.int32(0)
        side[warp, 1] = np.int32(0)
    cuda.syncthreads()
    upper = np.int32(0)
    many = np.int32(0)
    for i in range(start + lane, stop, LANES):
        number = steps(load(values[i - shift]), unit_of_block, np.int32(LEVELS))
        if number > middle:
            upper = np.int32(upper + number)
            many = np.int32(many + np.int32(1))
    cuda.atomic.add(side, (warp, 0), upper)
    cuda.atomic.add(side, (warp, 1), many)
    cuda.syncthreads()
    upper = side[warp, 0]
    many = side[warp, 1]
    # Nobody clears them before everybody has read them.
    cuda.syncthreads()
    return upper, many


def side_sums(values, shift, start, stop, unit_of_block, warp, lane):
    """The sums of both sides of a block, and the number of elements in the upper one, after all splits.

    Every thread must call it.
    """
    count = np.float32(max(stop - start, 1))
    total, many = beyond(values, shift, start, stop, unit_of_block, np.int32(-1), warp, lane)
    upper = total
    for _ in range(SPLITS):
        middle = threshold(np.float32(total - upper), np.float32(upper), np.float32(many), count)
        upper, many = beyond(values, shift, start, stop, unit_of_block, middle, warp, lane)
    return np.float32(total - upper), np.float32(upper), np.float32(many)


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
        if SPLITS > 0:
            sum0, sum1, sum2 = side_sums(values, shift, start, stop, unit(low, high), warp, lane)
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


def decode_kernel(words, codes, out):
    block = cuda.blockIdx.x * WARPS + cuda.threadIdx.y
    start = block * BLOCK
    if start < out.size:
        at = block * WORDS
        a, b, c, d = decode_constants(words[at], words[at + WORDS - 1], np.int32(LEVELS))
        for i in range(start + cuda.threadIdx.x, min(start + BLOCK, out.size), LANES):
            out[i] = store(decoded(words, codes, at, block * STRIDE, i - start, a, b, c, d))


def sum_block(totals, shift, words, codes, weights, replicas, size, ranks, n, stop, divisor, scale, lane, block):
    """Sums the decoded payloads, `size` bytes each, over the elements of one block before `stop`, in rank order.

    `words` and `codes` reach to the end of the last payload. A lane reads and writes only its own elements of `totals`, and of
    `replicas`, which has `n` elements for each payload.
    """
    start = block * BLOCK
    if start < n:
        for i in range(start + lane, stop, LANES):
            totals[i - shift] = np.float32(0.0)
        for rank in range(ranks):
            at = rank * (size // 4) + block * WORDS
            at_code = rank * size + block * STRIDE
            a, b, c, d = decode_constants(words[at], words[at + WORDS - 1], np.int32(LEVELS))
            for i in range(start + lane, stop, LANES):
                value = decoded(words, codes, at, at_code, i - start, a, b, c, d)
                if TRACKED:
                    replicas[rank * n + i] = add(replicas[rank * n + i], value)
                if WEIGHTED:
                    value = multiplied(value, weights[rank])
                totals[i - shift] = add(totals[i - shift], value)
        for i in range(start + lane, stop, LANES):
            if DIVIDED:
                totals[i - shift] = quotient(totals[i - shift], divisor)
            totals[i - shift] = multiplied(totals[i - shift], scale)


def decode_sum_kernel(words, codes, size, ranks, weights, out, divisor, scale):
    totals = cuda.shared.array(SUMMED, np.float32)
    warp, lane = cuda.threadIdx.y, cuda.threadIdx.x
    block = cuda.blockIdx.x * WARPS + warp
    shift = (block - warp) * BLOCK
    stop = min(block * BLOCK + BLOCK, out.size)
    # There are no replicas, and any vector of float32 stands for them.
    sum_block(totals, shift, words, codes, weights, weights, size, ranks, out.size, stop, divisor, scale, lane, block)
    for i in range(block * BLOCK + lane, stop, LANES):
        out[i] = store_output(totals[i - shift])


def reduce_kernel(words, codes, size, ranks, out_words, out_codes, counts, scale, n, seed_low, seed_high):
    totals = cuda.shared.array(SUMMED, np.float32)
    warp, lane = cuda.threadIdx.y, cuda.threadIdx.x
    block = cuda.blockIdx.x * WARPS + warp
    shift = (block - warp) * BLOCK
    stop = min(block * BLOCK + BLOCK, n)
    # There are neither weights nor replicas, and any vector of float32 stands for them.
    sum_block(totals, shift, words, codes, totals, totals, size, ranks, n, stop, scale, scale, lane, block)
    encode_block(totals, shift, out_words, out_codes, counts, n, seed_low, seed_high, warp, lane, block)


DEVICE_FUNCTIONS = (
    *(tree_sum, block_sum, beyond, side_sums, extremes_of),
    *(code_at, decoded, own_stop, encode_block, sum_block),
)
TEMPLATES = {
    "encode": encode_kernel,
    "decode": decode_kernel,
    "decode_sum": decode_sum_kernel,
    "reduce": reduce_kernel,
}
