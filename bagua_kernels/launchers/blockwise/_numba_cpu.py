"""Block quantizers on the CPU.

Each function below named `*_blocks` or `*_block` is a template: its upper-case names and rule names are bound when a kernel
is made. A block is sliced out before its loop: inside `range(size)` over a slice Numba needs no negative-index check, and
LLVM vectorises the loop, which makes the difference between 5 and 80 per cent of the copy rate.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
import torch

from bagua_kernels.jit._numba_cpu import LOAD, STORE, array, compile_template, run_parallel
from bagua_kernels.launchers.blockwise import Layout, rule_bindings, seed_halves
from bagua_kernels.rules.quantizers import BlockQuantizer

# Elements a task: large enough to hide the cost of a task, small enough for an even split over threads.
TASK = 16384
# Below this many elements waking other threads costs more than it saves.
SERIAL = 32768


def encode_block(values, words, codes, block, seed_low, seed_high):
    low = np.int32(0x7FFFFFFF)
    high = np.int32(-0x80000000)
    for i in range(values.size):
        key = ordered(float_bits(load(values[i])))
        low = min(low, key)
        high = max(high, key)
    first, second = scales(low, high)
    words[block * WORDS] = first
    if WORDS == 2:
        words[block * WORDS + 1] = second
    a, b, c, d = encode_constants(first, second)
    if STOCHASTIC:
        start = block * BLOCK
        key, second_key = random_key(seed_low, seed_high, np.uint32(start >> 32))
        for i in range(values.size):
            bits = random_bits(np.uint32(start + i), key, second_key)
            codes[i] = encode(load(values[i]), a, b, c, d, dither(bits))
    else:
        for i in range(values.size):
            # Adding -0 leaves every float as it is, so the compiler drops the addition.
            codes[i] = encode(load(values[i]), a, b, c, d, np.float32(-0.0))


def encode_blocks(x, words, codes, seed_low, seed_high, begin, end):
    for block in range(begin, end):
        start = block * BLOCK
        stop = min(start + BLOCK, x.size)
        encode_block(x[start:stop], words, codes[start:stop], block, seed_low, seed_high)


def decode_blocks(words, codes, out, begin, end):
    for block in range(begin, end):
        start = block * BLOCK
        stop = min(start + BLOCK, out.size)
        a, b, c, d = decode_constants(words[block * WORDS], words[block * WORDS + WORDS - 1])
        source = codes[start:stop]
        target = out[start:stop]
        for i in range(target.size):
            target[i] = store(decode(np.int32(source[i]), a, b, c, d))


def sum_block(words, codes, total, scale, block, start):
    total[:] = 0
    for rank in range(words.shape[0]):
        a, b, c, d = decode_constants(words[rank, block * WORDS], words[rank, block * WORDS + WORDS - 1])
        source = codes[rank, start : start + total.size]
        for i in range(total.size):
            total[i] += decode(np.int32(source[i]), a, b, c, d)
    for i in range(total.size):
        total[i] *= scale


def decode_sum_blocks(words, codes, out, scale, begin, end):
    scratch = np.empty(BLOCK, np.float32)
    for block in range(begin, end):
        start = block * BLOCK
        target = out[start : min(start + BLOCK, out.size)]
        total = scratch[: target.size]
        sum_block(words, codes, total, scale, block, start)
        for i in range(target.size):
            target[i] = store(total[i])


def reduce_blocks(words, codes, out_words, out_codes, scale, n, seed_low, seed_high, begin, end):
    scratch = np.empty(BLOCK, np.float32)
    for block in range(begin, end):
        start = block * BLOCK
        stop = min(start + BLOCK, n)
        total = scratch[: stop - start]
        sum_block(words, codes, total, scale, block, start)
        encode_block(total, out_words, out_codes[start:stop], block, seed_low, seed_high)


def encode_tasks(x, words, codes, seed_low, seed_high, blocks, task):
    for t in numba.prange((blocks + task - 1) // task):
        serial(x, words, codes, seed_low, seed_high, t * task, min((t + 1) * task, blocks))


def decode_tasks(words, codes, out, blocks, task):
    for t in numba.prange((blocks + task - 1) // task):
        serial(words, codes, out, t * task, min((t + 1) * task, blocks))


def decode_sum_tasks(words, codes, out, scale, blocks, task):
    for t in numba.prange((blocks + task - 1) // task):
        serial(words, codes, out, scale, t * task, min((t + 1) * task, blocks))


def reduce_tasks(words, codes, out_words, out_codes, scale, n, seed_low, seed_high, blocks, task):
    for t in numba.prange((blocks + task - 1) // task):
        begin, end = t * task, min((t + 1) * task, blocks)
        serial(words, codes, out_words, out_codes, scale, n, seed_low, seed_high, begin, end)


TEMPLATES = {
    "encode": (encode_blocks, encode_tasks),
    "decode": (decode_blocks, decode_tasks),
    "decode_sum": (decode_sum_blocks, decode_sum_tasks),
    "reduce": (reduce_blocks, reduce_tasks),
}


@functools.cache
def kernels(name: str, rule: BlockQuantizer, block: int, dtype: torch.dtype, stochastic: bool) -> tuple[Any, Any]:
    """The serial and the parallel form of a kernel."""
    bindings: dict[str, Any] = {
        "BLOCK": block,
        "WORDS": rule.words,
        "STOCHASTIC": stochastic,
        "load": LOAD[dtype],
        "store": STORE[dtype],
        **rule_bindings(rule),
    }
    inner = {f.__name__: compile_template(f, bindings) for f in (encode_block, sum_block)}
    over_blocks, over_tasks = TEMPLATES[name]
    serial = compile_template(over_blocks, {**bindings, **inner})
    return serial, compile_template(over_tasks, {"serial": serial}, parallel=True)


def run(name: str, rule: BlockQuantizer, dtype: torch.dtype, seed: int | None, layout: Layout, *arguments: Any) -> None:
    """Calls the kernel over all blocks, on one thread if there is little to do."""
    serial, parallel = kernels(name, rule, layout.block, dtype, seed is not None)
    if layout.n <= SERIAL:
        serial(*arguments, 0, layout.blocks)
    else:
        run_parallel(parallel, *arguments, layout.blocks, max(1, TASK // layout.block))


def clear_pads(words: Any, codes: Any, layout: Layout) -> None:
    """Zeroes the bytes after the scales and after the codes."""
    words[layout.blocks * layout.words :] = 0
    codes[layout.n :] = 0


def encode(rule: BlockQuantizer, x: torch.Tensor, payload: torch.Tensor, layout: Layout, seed: int | None) -> None:
    """See `bagua_kernels.launchers.blockwise.encode`."""
    words, codes = map(array, layout.parts(payload))
    run("encode", rule, x.dtype, seed, layout, array(x), words, codes, *map(np.uint32, seed_halves(seed)))
    clear_pads(words, codes, layout)


def decode(rule: BlockQuantizer, payload: torch.Tensor, out: torch.Tensor, layout: Layout) -> None:
    """See `bagua_kernels.launchers.blockwise.decode`."""
    words, codes = map(array, layout.parts(payload))
    run("decode", rule, out.dtype, None, layout, words, codes, array(out))


def decode_sum(rule: BlockQuantizer, payloads: torch.Tensor, out: torch.Tensor, scale: float, layout: Layout) -> None:
    """See `bagua_kernels.launchers.blockwise.decode_sum`."""
    words, codes = map(array, layout.parts(payloads))
    run("decode_sum", rule, out.dtype, None, layout, words, codes, array(out), np.float32(scale))


def reduce(
    rule: BlockQuantizer, payloads: torch.Tensor, out: torch.Tensor, scale: float, layout: Layout, seed: int | None
) -> None:
    """See `bagua_kernels.launchers.blockwise.reduce`."""
    words, codes = map(array, layout.parts(payloads))
    out_words, out_codes = map(array, layout.parts(out))
    arguments = (words, codes, out_words, out_codes, np.float32(scale), layout.n, *map(np.uint32, seed_halves(seed)))
    run("reduce", rule, torch.float32, seed, layout, *arguments)
    clear_pads(out_words, out_codes, layout)
