"""Block quantizers in Triton: a program takes a tile of ROWS blocks, a row a block.

Tiles have the shape [ROWS, FIELDS, STRIDE]: element (r, f, s) is number `f * STRIDE + s` of its block. Its code is in
field f of byte s of the block's bytes, so that packing is a sum over the middle axis. Per-row values have the shape [ROWS].
"""

from __future__ import annotations

import triton.language as tl


def places(n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The rows of this program; the tile's element numbers, and which are below `n`; the numbers of the bytes of its codes."""
    FIELDS: tl.constexpr = N_FIELDS
    STRIDE: tl.constexpr = BLOCK // N_FIELDS
    rows = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    within = tl.arange(0, FIELDS)[None, :, None] * STRIDE + tl.arange(0, STRIDE)[None, None, :]
    offsets = rows[:, None, None] * BLOCK + within
    byte_offsets = rows[:, None] * STRIDE + tl.arange(0, STRIDE)[None, :]
    return rows, offsets, offsets < n, byte_offsets


def own_elements(counts_ptr, n, rows, offsets, inside, COUNTED: tl.constexpr):
    """How many elements of each row are its own, and which elements of the tile are.

    Memory is read and written where the vector is, not by these, so that accesses stay as wide as they can be.
    """
    BLOCK: tl.constexpr = offsets.shape[1] * offsets.shape[2]
    count = tl.cast(tl.minimum(tl.maximum(n - rows * BLOCK, 0), BLOCK), tl.int32)
    if COUNTED:
        given = tl.load(counts_ptr + rows, mask=rows < tl.cdiv(n, BLOCK), other=0)
        count = tl.minimum(count, tl.maximum(given, 0))
        inside = inside & (offsets - wide(rows * BLOCK) < wide(count))
    return count, inside


def wide(per_row):
    """A value a row, to go with a tile."""
    return per_row[:, None, None]


def tree_sum(terms_tile):
    """Adds up each row in the order that the wire format fixes. A sum of two is the same whichever comes first."""
    ROWS: tl.constexpr = terms_tile.shape[0]
    BLOCK: tl.constexpr = terms_tile.shape[1] * terms_tile.shape[2]
    left = tl.reshape(terms_tile, [ROWS, BLOCK])
    # The largest block has 2^12 elements.
    for level in tl.static_range(12):
        if (BLOCK >> (level + 1)) > 0:
            left = tl.sum(tl.reshape(left, [ROWS, 2, BLOCK >> (level + 1)]), axis=1)
    return tl.reshape(left, [ROWS])


def row_extreme(tile, GREATEST: tl.constexpr):
    """The least or the greatest of each row."""
    if GREATEST:
        return tl.max(tl.max(tile, axis=2), axis=1)
    else:
        return tl.min(tl.min(tile, axis=2), axis=1)


def row_total(tile):
    """The sum of each row of integers."""
    return tl.sum(tl.sum(tile, axis=2), axis=1)


def side_sums(x, inside, count, divisor, unit_of_row):
    """The sums of both sides of each row, and the number of elements in the upper one, after all splits."""
    number = tl.where(inside, steps(x, wide(unit_of_row), N_LEVELS), 0)
    total = row_total(number)
    upper = total
    many = count
    for _ in range(N_SPLITS):
        middle = threshold(
            tl.cast(total - upper, tl.float32), tl.cast(upper, tl.float32), tl.cast(many, tl.float32), divisor
        )
        # Elements that are not inside have no steps, and are in no upper side.
        beyond = number > wide(middle)
        upper = row_total(tl.where(beyond, number, 0))
        many = row_total(tl.where(beyond, 1, 0))
    return tl.cast(total - upper, tl.float32), tl.cast(upper, tl.float32), tl.cast(many, tl.float32)


def statistics(x, inside, count):
    """The scales of each row, of which `count` elements are its own: those of zeros where none is."""
    SUMS: tl.constexpr = N_SUMS
    SPLITS: tl.constexpr = N_SPLITS
    if N_RANGE:
        keys = ordered(float_bits(x))
        low = row_extreme(tl.where(inside, keys, 0x7FFFFFFF), False)
        high = row_extreme(tl.where(inside, keys, -0x80000000), True)
        low = tl.where(count > 0, low, 0)
        high = tl.where(count > 0, high, 0)
    else:
        low = tl.zeros([x.shape[0]], tl.int32)
        high = row_extreme(tl.where(inside, float_bits(x) & 0x7FFFFFFF, 0), True)
    nothing = tl.zeros([x.shape[0]], tl.float32)
    divisor = tl.cast(tl.maximum(count, 1), tl.float32)
    if SPLITS > 0:
        lower, upper, many = side_sums(x, inside, count, divisor, unit(low, high))
        return scales(low, high, lower, upper, many, divisor, N_LEVELS)
    elif SUMS == 0:
        return scales(low, high, nothing, nothing, nothing, divisor, N_LEVELS)
    else:
        term0, term1, term2 = terms(x, wide(unit(low, high)))
        sum0 = tree_sum(tl.where(inside, term0, 0.0))
        if SUMS == 1:
            return scales(low, high, sum0, nothing, nothing, divisor, N_LEVELS)
        else:
            sum1 = tree_sum(tl.where(inside, term1, 0.0))
            sum2 = tree_sum(tl.where(inside, term2, 0.0))
            return scales(low, high, sum0, sum1, sum2, divisor, N_LEVELS)


def encode_tile(
    x, words_ptr, codes_ptr, n, rows, offsets, count, inside, byte_offsets, seed_low, seed_high,
    STOCHASTIC: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """Encodes a tile of float32 values and stores its scales and codes, zeroing the pads that fall into it.

    `count` elements of each row are its own, those that are `inside`; codes of others are 0.

    Returns:
        The codes, [ROWS, FIELDS, STRIDE], and both scales of each row.
    """
    WORDS: tl.constexpr = N_WORDS
    BITS: tl.constexpr = N_BITS
    FIELDS: tl.constexpr = N_FIELDS
    BLOCK: tl.constexpr = x.shape[1] * x.shape[2]
    blocks = tl.cdiv(n, BLOCK)
    present = rows < blocks
    if GIVEN:
        first = tl.load(words_ptr + rows * WORDS, mask=present, other=0)
        second = tl.load(words_ptr + rows * WORDS + WORDS - 1, mask=present, other=0)
    else:
        first, second = statistics(x, inside, count)
        stored = rows < tl.cdiv(blocks * WORDS, 4) * 4 // WORDS
        tl.store(words_ptr + rows * WORDS, tl.where(present, first, 0), mask=stored)
        if WORDS == 2:
            tl.store(words_ptr + rows * WORDS + 1, tl.where(present, second, 0), mask=stored)
    b_a, b_b, b_c, b_d = encode_constants(wide(first), wide(second), N_LEVELS)
    if STOCHASTIC:
        index_high = tl.cast(offsets >> 32, tl.uint32)
        key, second_key = random_key(tl.cast(seed_low, tl.uint32), tl.cast(seed_high, tl.uint32), index_high)
        noise = dither(random_bits(tl.cast(offsets, tl.uint32), key, second_key))
        codes = encode(x, b_a, b_b, b_c, b_d, noise, N_LEVELS)
    else:
        codes = encode(x, b_a, b_b, b_c, b_d, 0.0, N_LEVELS)
    codes = tl.where(inside, codes & N_MASK, 0)
    if FIELDS == 1:
        packed = tl.reshape(codes, byte_offsets.shape)
        padded = tl.cdiv(n, 16) * 16
    else:
        shifts = (tl.arange(0, FIELDS) * BITS)[None, :, None]
        packed = tl.sum(codes << shifts, axis=1)
        padded = tl.cdiv(blocks * (BLOCK // FIELDS), 16) * 16
    tl.store(codes_ptr + byte_offsets, tl.cast(packed, tl.uint8), mask=byte_offsets < padded)
    return codes, first, second


def with_sign(codes):
    """Codes as integers, with their sign if they have one."""
    if N_SIGNED:
        return (codes ^ N_HALF) - N_HALF
    else:
        return codes


def decoded_tile(words_ptr, codes_ptr, n, rows, offsets, inside, byte_offsets):
    """The values of a tile, float32."""
    WORDS: tl.constexpr = N_WORDS
    BITS: tl.constexpr = N_BITS
    FIELDS: tl.constexpr = N_FIELDS
    BLOCK: tl.constexpr = offsets.shape[1] * offsets.shape[2]
    present = rows < tl.cdiv(n, BLOCK)
    first = tl.load(words_ptr + rows * WORDS, mask=present, other=0)
    second = tl.load(words_ptr + rows * WORDS + WORDS - 1, mask=present, other=0)
    b_a, b_b, b_c, b_d = decode_constants(wide(first), wide(second), N_LEVELS)
    if FIELDS == 1:
        packed = tl.load(codes_ptr + offsets, mask=inside, other=0)
        codes = tl.cast(packed, tl.int32)
    else:
        packed = tl.load(codes_ptr + byte_offsets, mask=present[:, None], other=0)
        shifts = (tl.arange(0, FIELDS) * BITS)[None, :, None]
        codes = (tl.cast(packed, tl.int32)[:, None, :] >> shifts) & N_MASK
    return decode(with_sign(codes), b_a, b_b, b_c, b_d, N_LEVELS)


def encode_kernel(
    x_ptr, words_ptr, codes_ptr, counts_ptr, n, seed_low, seed_high,
    STOCHASTIC: tl.constexpr, GIVEN: tl.constexpr, COUNTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A quotient rounded up overflows for lengths next to 2^31.
    n = tl.cast(n, tl.int64)
    rows, offsets, inside, byte_offsets = places(n, ROWS, BLOCK)
    count, own = own_elements(counts_ptr, n, rows, offsets, inside, COUNTED)
    x = load(tl.load(x_ptr + offsets, mask=inside, other=0))
    encode_tile(
        x, words_ptr, codes_ptr, n, rows, offsets, count, own, byte_offsets, seed_low, seed_high, STOCHASTIC, GIVEN
    )


def encode_pieces_kernel(
    addresses_ptr, sizes_ptr, firsts_ptr, piece_of_block_ptr, x_ptr, words_ptr, codes_ptr, n, seed_low, seed_high,
    STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`x_ptr` gives the element type only: each row finds its piece's address in a table."""
    # A quotient rounded up overflows for lengths next to 2^31.
    n = tl.cast(n, tl.int64)
    rows, offsets, inside, byte_offsets = places(n, ROWS, BLOCK)
    present = rows < tl.cdiv(n, BLOCK)
    piece = tl.load(piece_of_block_ptr + rows, mask=present, other=0)
    start = (rows - tl.load(firsts_ptr + piece)) * BLOCK
    left = tl.load(sizes_ptr + piece) - start
    within = offsets - wide(rows * BLOCK)
    source = tl.cast(tl.load(addresses_ptr + piece), x_ptr.dtype, bitcast=True) + start
    count = tl.cast(tl.minimum(left, BLOCK), tl.int32)
    inside = inside & (within < wide(left))
    x = load(tl.load(wide(source) + within, mask=inside, other=0))
    encode_tile(
        x, words_ptr, codes_ptr, n, rows, offsets, count, inside, byte_offsets, seed_low, seed_high, STOCHASTIC, False
    )


def decoded_sum(
    words_ptr, codes_ptr, weights_ptr, replicas_ptr, ranks, size, span, n, divisor, scale, rows, offsets, inside, own,
    byte_offsets, WEIGHTED: tl.constexpr, DIVIDED: tl.constexpr, TRACKED: tl.constexpr,
):  # fmt: skip
    """Decodes the tile of every payload, `size` bytes apart, and returns `scale` times the sum, taken in rank order.

    With weights, each decoded value is multiplied by its payload's weight. With replicas, `span` elements apart, each decoded
    value is also added to its payload's replica, where the element is `own`.
    """
    total = tl.zeros(offsets.shape, tl.float32)
    for rank in range(ranks):
        at = tl.cast(rank, tl.int64) * size
        x = decoded_tile(words_ptr + at // 4, codes_ptr + at, n, rows, offsets, inside, byte_offsets)
        if TRACKED:
            here = replicas_ptr + tl.cast(rank, tl.int64) * span + offsets
            before = tl.load(here, mask=inside, other=0)
            tl.store(here, tl.where(own, before + x, before), mask=inside)
        if WEIGHTED:
            x = x * tl.load(weights_ptr + rank)
        total += x
    if DIVIDED:
        total = tl.div_rn(total, tl.zeros(offsets.shape, tl.float32) + divisor)
    return total * scale


def decode_kernel(words_ptr, codes_ptr, out_ptr, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    # A quotient rounded up overflows for lengths next to 2^31.
    n = tl.cast(n, tl.int64)
    rows, offsets, inside, byte_offsets = places(n, ROWS, BLOCK)
    x = decoded_tile(words_ptr, codes_ptr, n, rows, offsets, inside, byte_offsets)
    tl.store(out_ptr + offsets, store(x), mask=inside)


def decode_sum_kernel(
    words_ptr, codes_ptr, weights_ptr, out_ptr, ranks, size, n, divisor, scale,
    WEIGHTED: tl.constexpr, DIVIDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A quotient rounded up overflows for lengths next to 2^31.
    n = tl.cast(n, tl.int64)
    rows, offsets, inside, byte_offsets = places(n, ROWS, BLOCK)
    total = decoded_sum(
        words_ptr, codes_ptr, weights_ptr, words_ptr, ranks, size, 0, n, divisor, scale, rows, offsets, inside, inside,
        byte_offsets, WEIGHTED, DIVIDED, False,
    )  # fmt: skip
    tl.store(out_ptr + offsets, store(total), mask=inside)


def reduce_kernel(
    words_ptr, codes_ptr, out_words_ptr, out_codes_ptr, counts_ptr, ranks, size, n, scale, seed_low, seed_high,
    STOCHASTIC: tl.constexpr, COUNTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A quotient rounded up overflows for lengths next to 2^31.
    n = tl.cast(n, tl.int64)
    rows, offsets, inside, byte_offsets = places(n, ROWS, BLOCK)
    total = decoded_sum(
        words_ptr, codes_ptr, words_ptr, words_ptr, ranks, size, 0, n, scale, scale, rows, offsets, inside, inside,
        byte_offsets, False, False, False,
    )  # fmt: skip
    count, own = own_elements(counts_ptr, n, rows, offsets, inside, COUNTED)
    encode_tile(
        total, out_words_ptr, out_codes_ptr, n, rows, offsets, count, own, byte_offsets, seed_low, seed_high,
        STOCHASTIC, False,
    )  # fmt: skip


def chunk_of_program(total, span, width, size, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Where a program's chunk begins, how many elements it has, and where its row and its codes begin, in bytes."""
    row = tl.cast(tl.program_id(1), tl.int64)
    begin = row * span
    n = tl.minimum(tl.maximum(tl.cast(total, tl.int64) - begin, 0), width)
    if EVEN:
        # What the compiler cannot know of a minimum: accesses are as wide as they can be.
        n = tl.multiple_of(n, 16)
    scale_bytes = tl.cdiv(tl.cdiv(n, BLOCK) * N_WORDS, 4) * 16
    return begin, n, row * size, row * size + scale_bytes


def encode_rows_kernel(
    x_ptr, words_ptr, codes_ptr, counts_ptr, seeds_ptr, total, span, width, size,
    STOCHASTIC: tl.constexpr, COUNTED: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin, n, at_words, at_codes = chunk_of_program(total, span, width, size, BLOCK, EVEN)
    rows, offsets, inside, byte_offsets = places(n, ROWS, BLOCK)
    count, own = own_elements(counts_ptr + begin // BLOCK, n, rows, offsets, inside, COUNTED)
    x = load(tl.load(x_ptr + begin + offsets, mask=inside, other=0))
    seed_low = 0
    seed_high = 0
    if STOCHASTIC:
        seed_low = tl.load(seeds_ptr + 2 * tl.program_id(1))
        seed_high = tl.load(seeds_ptr + 2 * tl.program_id(1) + 1)
    encode_tile(
        x, words_ptr + at_words // 4, codes_ptr + at_codes, n, rows, offsets, count, own, byte_offsets, seed_low, seed_high,
        STOCHASTIC, False,
    )  # fmt: skip


def decode_rows_kernel(
    words_ptr, codes_ptr, out_ptr, total, span, width, size,
    EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin, n, at_words, at_codes = chunk_of_program(total, span, width, size, BLOCK, EVEN)
    rows, offsets, inside, byte_offsets = places(n, ROWS, BLOCK)
    x = decoded_tile(words_ptr + at_words // 4, codes_ptr + at_codes, n, rows, offsets, inside, byte_offsets)
    tl.store(out_ptr + begin + offsets, store(x), mask=inside)


FUNCTIONS = (
    *(places, wide, own_elements, tree_sum, row_extreme, row_total, side_sums, statistics),
    *(encode_tile, with_sign, decoded_tile, decoded_sum, chunk_of_program),
)
TEMPLATES = {
    "encode": encode_kernel,
    "encode_pieces": encode_pieces_kernel,
    "decode": decode_kernel,
    "decode_sum": decode_sum_kernel,
    "reduce": reduce_kernel,
    "encode_rows": encode_rows_kernel,
    "decode_rows": decode_rows_kernel,
}
