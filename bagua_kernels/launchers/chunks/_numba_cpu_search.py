"""The largest elements of a chunk on the CPU: 64 elements at once are compared with a threshold, which leaves a bit of each.

A pass over a chunk in the first cache takes less time than a look at a few dozen of its elements. So a threshold is tried
until it leaves few more elements than are wanted, and only these are looked at.
"""

from __future__ import annotations

import numpy as np

from bagua_kernels.jit._numba_cpu_intrinsics import MASK_BITS, count_bits, lowest_bit, reaching, wide_vectors
from bagua_kernels.rules.selection import magnitude_key

# The first step from a threshold to another: numbers whose keys are so far apart differ by 6 to 12 %. The guess for a chunk is
# the threshold of the chunk before it, less this step.
STEP = 1 << 20
# A threshold may leave so many times the wanted number of elements.
MOST = 4


def mark(values, threshold, masks):
    """Marks the elements that reach a threshold by the bits of masks, and returns their number."""
    wide_vectors()
    whole = values.size // MASK_BITS
    count = np.int64(0)
    for m in range(whole):
        mask = reaching(values, m * MASK_BITS, threshold)
        masks[m] = mask
        count += count_bits(mask)
    if whole * MASK_BITS < values.size:
        rest = np.uint64(0)
        for i in range(values.size - 1, whole * MASK_BITS - 1, -1):
            rest = (rest << np.uint64(1)) | np.uint64(magnitude_key(values[i]) >= threshold)
        masks[whole] = rest
        count += count_bits(rest)
    return count


def threshold_of(values, k, guess, masks):
    """Marks k elements or a few more that reach a threshold, or all that reach the k-th largest key.

    Returns:
        The threshold and the number of these elements.
    """
    # At least k elements reach the first, and fewer the second.
    least, beyond = np.int64(0), np.int64(1) << 31
    threshold, step = np.int64(guess), np.int64(STEP)
    while True:
        count = mark(values, np.int32(threshold), masks)
        if count >= k:
            least = threshold
            if count <= MOST * k or least + 1 == beyond:
                return least, count
            threshold += step
        else:
            beyond = threshold
            # Many chunks have fewer than k elements that are not zero.
            threshold = max(threshold - step, min(beyond - 1, np.int64(1)))
        step *= 2
        if threshold <= least or threshold >= beyond:
            threshold = (least + beyond) // 2


def gather(values, masks, found, places):
    """Copies the marked elements and their indices, and zeros up to a whole number of masks."""
    count = 0
    for m in range((values.size + MASK_BITS - 1) // MASK_BITS):
        mask = masks[m]
        while mask != np.uint64(0):
            i = m * MASK_BITS + lowest_bit(mask)
            mask &= mask - np.uint64(1)
            found[count] = values[i]
            places[count] = i
            count += 1
    while count % MASK_BITS != 0:
        found[count] = 0.0
        count += 1


def raised(found, k, threshold):
    """A key that k of some elements reach, or else the k-th largest key; all elements but zeros reach `threshold`."""
    wide_vectors()
    top = np.int32(0)
    for i in range(found.size):
        top = max(top, magnitude_key(found[i]))
    bits = 0
    while (top - threshold) >> bits > 0:
        bits += 1
    for bit in range(bits - 1, -1, -1):
        candidate = threshold + (np.int64(1) << bit)
        if candidate <= top:
            count = np.int64(0)
            for start in range(0, found.size, MASK_BITS):
                count += count_bits(reaching(found, start, np.int32(candidate)))
            if count >= k:
                threshold = candidate
                if count == k:
                    break
    return threshold


def choose(values, k, guess, masks, found, places, kept, indices):
    """Copies the k largest elements, of equal ones those of lowest index, and their indices, in order.

    Args:
        values: shape (size,), float32.
        k: from 1 to `size`.
        guess: a key, such as that of the smallest of these elements.
        masks: room for a mask of each 64 elements or less, uint64.
        found: room for whole masks of elements, float32.
        places: room for their indices, int32.
        kept: room for more than k elements, float32.
        indices: room for their indices, int32.

    Returns:
        A key near the smallest of these elements.
    """
    threshold, count = threshold_of(values, k, guess, masks)
    gather(values, masks, found, places)
    if count > k:
        threshold = raised(found[: (count + MASK_BITS - 1) // MASK_BITS * MASK_BITS], k, threshold)
    ties = k
    for i in range(count):
        ties -= magnitude_key(found[i]) > threshold
    taken = 0
    for i in range(count):
        key = magnitude_key(found[i])
        tie = key == threshold and ties > 0
        # What is not taken is overwritten.
        kept[taken] = found[i]
        indices[taken] = places[i]
        taken += key > threshold or tie
        ties -= tie
    return threshold
