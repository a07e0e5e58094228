"""The sweep over tensor objects, compiled. It holds the interpreter's lock, so that nothing it follows can go away."""

from __future__ import annotations

from typing import Any

from bagua_kernels.jit._numba_cpu import compile_template
from bagua_kernels.jit._numba_cpu_intrinsics import prefetch_address, word_at

WORD = 8
# The last byte of the word with the dtype and the flags is padding, with whatever lay there before.
FLAGS = (1 << 56) - 1
# Far enough for memory to answer, near enough for the cache to keep it.
AHEAD = 12


def unchanged(objects, own, params, gradients, undefined, seen, item, addresses, missing):
    """See `bagua_kernels.optim.watch.Watch.look`; `seen` has the tensors of the last gradients, where to look next."""
    for i in range(objects.size):
        if i + AHEAD < objects.size:
            prefetch_address(objects[i + AHEAD])
            prefetch_address(own[i + AHEAD, 0])
            prefetch_address(own[i + AHEAD, 0] + 128)
            prefetch_address(own[i + AHEAD, 1])
            if i + AHEAD < params:
                prefetch_address(seen[i + AHEAD, 0])
                prefetch_address(seen[i + AHEAD, 1])
                prefetch_address(seen[i + AHEAD, 1] + 128)
                prefetch_address(seen[i + AHEAD, 2])
        tensor = word_at(objects[i] + IN_OBJECT * WORD)
        if tensor != own[i, 0]:
            return False
        storage = word_at(tensor + IN_TENSOR * WORD)
        if storage != own[i, 1]:
            return False
        difference = 0
        for k in range(MEMORY):
            difference |= word_at(storage + (DATA + k) * WORD) ^ own[i, 2 + k]
        for k in range(SPAN):
            difference |= word_at(tensor + (FIRST + k) * WORD) ^ own[i, 2 + MEMORY + k]
        if difference != 0:
            return False
        if i < params:
            autograd = word_at(tensor + IN_AUTOGRAD * WORD)
            gradient = word_at(autograd + GRADIENT * WORD) if autograd != 0 else undefined
            missing[i] = gradient == undefined
            if gradient == undefined:
                addresses[i] = 0
                continue
            if gradient == 0:
                return False
            storage = word_at(gradient + IN_TENSOR * WORD)
            if storage == 0:
                return False
            for k in range(SPAN):
                if k != OFFSET - FIRST:
                    changed = word_at(gradient + (FIRST + k) * WORD) ^ gradients[i, k]
                    difference |= changed & FLAGS if k == SPAN - 2 else changed
            if difference != 0:
                return False
            seen[i, 0] = autograd
            seen[i, 1] = gradient
            seen[i, 2] = storage
            addresses[i] = word_at(storage + DATA * WORD) + word_at(gradient + OFFSET * WORD) * item
    return True


def compiled(positions: dict[str, int]) -> Any:
    """The function for these positions of the fields, from Numba's cache on disk if it is there."""
    names = {"word_at": word_at, "prefetch_address": prefetch_address, "WORD": WORD, "FLAGS": FLAGS, "AHEAD": AHEAD}
    return compile_template(unchanged, {**names, **positions}, nogil=False)
