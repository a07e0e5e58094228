"""Chunked top-k in Triton: a program takes a chunk; bits of the record are set by atomic operations."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from bagua_kernels.jit._triton import EXACT, LOAD, STORE, bits, compile_template, on_device
from bagua_kernels.launchers.chunks import INFINITE, Record, add_in_turn
from bagua_kernels.rules import two_magnitudes
from bagua_kernels.rules.rounding import float_bits
from bagua_kernels.rules.selection import magnitude_key

WARPS = 8


def encode_kernel(
    x_ptr, start_ptr, residual_ptr, records_ptr, n, beta, k, last,
    CHUNK: tl.constexpr, WORDS: tl.constexpr, LOW: tl.constexpr, HIGH_AT: tl.constexpr, CODES_AT: tl.constexpr,
    MAGNITUDES_AT: tl.constexpr, BEYOND: tl.constexpr, LEAST: tl.constexpr, EVERY: tl.constexpr,
    RESIDUAL: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    chunk = tl.cast(tl.program_id(0), tl.int64)
    offset = tl.arange(0, CHUNK)
    at = chunk * CHUNK + offset
    inside = at < n
    value = load(tl.load(x_ptr + at, mask=inside, other=0))
    if START:
        value = load(store(tl.load(start_ptr + at, mask=inside, other=0.0))) - value
    if RESIDUAL:
        value = tl.load(residual_ptr + at, mask=inside, other=0.0) * beta + value
    key = tl.where(inside, magnitude_key(value), -1)
    count = tl.where(chunk == tl.num_programs(0) - 1, last, k)
    threshold = 0
    for step in range(31):
        candidate = threshold | (1 << (30 - step))
        threshold = tl.where(tl.sum(tl.cast(key >= candidate, tl.int32), axis=0) >= count, candidate, threshold)
    ties = count - tl.sum(tl.cast(key > threshold, tl.int32), axis=0)
    equal = key == threshold
    chosen = (key > threshold) | (equal & (tl.cumsum(tl.cast(equal, tl.int32), axis=0) <= ties))
    place = tl.cumsum(tl.cast(chosen, tl.int32), axis=0) - 1
    normal = chosen & (key < BEYOND)
    greatest = tl.maximum(tl.max(tl.where(normal, field(key), 0), axis=0), LEAST)
    steps = tl.cast(tl.where(normal, steps_of(key, greatest), 0), tl.int64)
    normals = tl.sum(tl.cast(normal, tl.int64), axis=0)
    # At first all steps are small, so that their mean divides them next.
    middle = tl.full((), EVERY, tl.int64)
    for _ in range(5):
        small = normal & (steps <= middle)
        few = tl.sum(tl.cast(small, tl.int64), axis=0)
        lower = tl.sum(tl.where(small, steps, 0), axis=0) // tl.maximum(few, 1)
        upper = tl.sum(tl.where(small, 0, steps), axis=0) // tl.maximum(normals - few, 1)
        middle = (lower + tl.where(normals > few, upper, lower)) // 2
    finite = normals == count
    small = normal & (steps <= tl.where(finite, middle, EVERY))
    few = tl.sum(tl.cast(small, tl.int64), axis=0)
    a = magnitude_bits(tl.sum(tl.where(small, steps, 0), axis=0), few, greatest)
    b = magnitude_bits(tl.sum(tl.where(small, 0, steps), axis=0), normals - few, greatest)
    b = tl.where(finite, tl.where(normals > few, b, a), 0x7FC0)
    magnitudes = tl.cast((b << 16) | a, tl.int32)
    record = records_ptr + chunk * WORDS
    if LOW > 0:
        low = offset & ((1 << LOW) - 1)
        bit = place * LOW
        tl.atomic_or(record + (bit >> 5), tl.cast(low << (bit & 31), tl.int32), mask=chosen)
        over = chosen & ((bit & 31) + LOW > 32)
        tl.atomic_or(record + (bit >> 5) + 1, tl.cast(low >> ((32 - (bit & 31)) & 31), tl.int32), mask=over)
    bit = (offset >> LOW) + place
    tl.atomic_or(record + HIGH_AT + (bit >> 5), tl.cast(1 << (bit & 31), tl.int32), mask=chosen)
    code = tl.where(chosen & (small == 0), 1, 0) | tl.where(float_bits(value) < 0, 2, 0)
    bit = 2 * place
    tl.atomic_or(record + CODES_AT + (bit >> 5), tl.cast(code << (bit & 31), tl.int32), mask=chosen)
    tl.store(record + MAGNITUDES_AT, magnitudes)
    if RESIDUAL:
        value = tl.where(chosen, value - magnitude_value(code, magnitudes), value)
        tl.store(residual_ptr + at, tl.where(key < BEYOND, value, 0.0), mask=inside)


def low_of(record, place, present, LOW: tl.constexpr):
    """The lower bits of the indices of entries."""
    at = place * LOW
    shift = at & 31
    first = tl.cast(tl.load(record + (at >> 5), mask=present, other=0), tl.int64) & 0xFFFFFFFF
    over = present & (shift + LOW > 32)
    second = tl.cast(tl.load(record + (at >> 5) + 1, mask=over, other=0), tl.int64)
    return tl.cast(((first | (second << 32)) >> shift) & ((1 << LOW) - 1), tl.int32)


def add_kernel(
    record_ptr, out_ptr, senders_ptr, flags_ptr, n, k, last,
    CHUNK: tl.constexpr, WORDS: tl.constexpr, LOW: tl.constexpr, HIGH_AT: tl.constexpr, CODES_AT: tl.constexpr,
    MAGNITUDES_AT: tl.constexpr, COUNTED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Adds the entries of one rank's record of a chunk."""
    chunk = tl.cast(tl.program_id(0), tl.int64)
    record = record_ptr + chunk * WORDS
    count = tl.where(chunk == tl.num_programs(0) - 1, last, k)
    size = tl.minimum(n - chunk * CHUNK, CHUNK)
    bit = tl.arange(0, BITS)
    readable = bit < 32 * (CODES_AT - HIGH_AT)
    is_set = ((tl.load(record + HIGH_AT + (bit >> 5), mask=readable, other=0) >> (bit & 31)) & 1) > 0
    place = tl.cumsum(tl.cast(is_set, tl.int32), axis=0) - 1
    known = is_set & (place < count)
    index = (bit - place) << LOW
    wrong = known & (index >= size)
    if LOW > 0:
        low = low_of(record, place, known, LOW)
        index |= low
        # Of neighbours in the high part the upper bits are equal, and the lower ones ascend.
        before = bit - 1
        behind = known & (place > 0)
        neighbour = tl.load(record + HIGH_AT + (before >> 5), mask=behind, other=0) >> (before & 31)
        behind = behind & ((neighbour & 1) > 0)
        wrong = known & ((index >= size) | (behind & (low_of(record, place - 1, behind, LOW) >= low)))
    tl.store(flags_ptr, 1, mask=tl.sum(tl.cast(is_set, tl.int32), axis=0) != count)
    tl.store(flags_ptr + tl.zeros_like(bit), 1, mask=wrong)
    good = known & (wrong == 0)
    code = tl.load(record + CODES_AT + ((2 * place) >> 5), mask=good, other=0) >> ((2 * place) & 31)
    value = magnitude_value(code & 3, tl.load(record + MAGNITUDES_AT))
    to = chunk * CHUNK + index
    tl.store(out_ptr + to, tl.load(out_ptr + to, mask=good, other=0.0) + value, mask=good)
    if COUNTED:
        tl.store(senders_ptr + to, tl.load(senders_ptr + to, mask=good, other=0) + 1, mask=good)


@functools.cache
def kernel(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The compiled kernel."""
    rules = (
        two_magnitudes.field,
        two_magnitudes.steps_of,
        two_magnitudes.magnitude_bits,
        two_magnitudes.magnitude_value,
        magnitude_key,
        float_bits,
    )
    names = {**{f.__name__: f for f in rules}, "load": LOAD[dtype], "store": STORE[dtype]}
    names["low_of"] = compile_template(low_of, {})
    template = {"encode": encode_kernel, "add": add_kernel}[name]
    return compile_template(template, names, ("n", "k", "last"))


def form_of(record: Record) -> dict[str, int]:
    """The numbers of a form that kernels are compiled for."""
    high, codes, magnitudes = record.starts
    parts = {"HIGH_AT": high, "CODES_AT": codes, "MAGNITUDES_AT": magnitudes}
    return {"CHUNK": record.chunk, "WORDS": record.words, "LOW": record.low_bits, **parts}


def encode(
    x: torch.Tensor,
    records: torch.Tensor,
    record: Record,
    residual: torch.Tensor | None,
    start: torch.Tensor | None,
    beta: float,
) -> None:
    """See `bagua_kernels.launchers.chunks.encode`."""
    records.zero_()
    options: dict[str, Any] = {"RESIDUAL": residual is not None, "START": start is not None}
    options |= {"BEYOND": INFINITE, "LEAST": two_magnitudes.LEAST_FIELD}
    options |= {"EVERY": two_magnitudes.EVERY, **form_of(record)}
    others = (x if each is None else each for each in (start, residual))
    with on_device(x):
        kernel("encode", x.dtype)[(len(records),)](
            bits(x), *others, records, x.numel(), beta, record.k, record.kept_in_last(x.numel()),
            num_warps=WARPS, **options, **EXACT,
        )  # fmt: skip


def add(
    row: torch.Tensor, out: torch.Tensor, record: Record, senders: torch.Tensor | None, flags: torch.Tensor
) -> None:
    """Adds the records of one rank to `out`, and counts their entries if there are `senders`."""
    high, codes, _ = record.starts
    with on_device(out):
        kernel("add")[(len(row),)](
            row, out, flags if senders is None else senders, flags, out.numel(), record.k, record.kept_in_last(out.numel()),
            COUNTED=senders is not None, BITS=triton.next_power_of_2(32 * (codes - high)), num_warps=WARPS,
            **form_of(record), **EXACT,
        )  # fmt: skip


# See `bagua_kernels.launchers.chunks.decode_sum`.
decode_sum = functools.partial(add_in_turn, add)
