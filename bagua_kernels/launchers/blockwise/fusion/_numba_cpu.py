"""Rules around a block quantizer on the CPU, a block of every array at a time, while it is in the cache."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit._numba_cpu import LOAD, STORE, array, compile_template
from bagua_kernels.jit._numba_cpu_intrinsics import as_bytes, borrowed, keep, part, row, wide_vectors
from bagua_kernels.jit._numba_cpu_sharing import shared
from bagua_kernels.jit.source import function_from_source
from bagua_kernels.launchers.arguments import Weights, seed_halves
from bagua_kernels.launchers.blockwise._numba_cpu import bound, clear_pads, counts_array, over_blocks, weights_array
from bagua_kernels.launchers.blockwise.form import BlockForm
from bagua_kernels.launchers.blockwise.fusion.sources import Mixture, Rows, RowSum, Sources, message_lines
from bagua_kernels.launchers.elementwise import call_lines
from bagua_kernels.rules.messages import MessageRule
from bagua_kernels.rules.optimizers import ElementwiseRule
from bagua_kernels.rules.quantizers import BlockQuantizer

NAMES = {
    "__name__": __name__,
    "np": np,
    "borrowed": borrowed,
    "keep": keep,
    "part": part,
    "row": row,
    "as_bytes": as_bytes,
    "shared": shared,
    "wide_vectors": wide_vectors,
}
NO_REPLICAS = np.empty((0, 0), np.float32)


def sum_rows(replicas, weights, start, total, divisor):
    """Sums up the block of all replicas, in their order; the first of its elements has the number `start`."""
    wide_vectors()
    for rank in range(replicas.shape[0]):
        replica = row(replicas, rank)
        ask_for(replica, start, BLOCK)
        values = part(replica, start, start + total.size)
        weight = weights[rank]
        for i in range(total.size):
            before = np.float32(0.0) if rank == 0 else total[i]
            total[i] = before + weighed(values[i], weight)
    if replicas.shape[0] == 0:
        clear(total, 0)
    if DIVIDED:
        for i in range(total.size):
            total[i] = quotient(total[i], divisor)


def message_source(message: MessageRule, summed: bool) -> str:
    """The text of the kernel that encodes what a rule computes.

    Args:
        message: the rule.
        summed: True if its last array is the sum of replicas.
    """
    arrays = range(message.arrays - summed)
    last = message.arrays - 1
    before, value, after = message_lines(message)
    columns = ", ".join([f"a{i}" for i in arrays] + [f"s{i}" for i in range(message.scalars)])
    arguments = f"words, codes, counts, replicas, weights, divisor, {columns}, n, seed_low, seed_high"
    lines = [
        f"def message_blocks({arguments}, begin, end, threads, launcher):",
        "    if shared(begin, end, threads, launcher):",
        "        return",
        "    wide_vectors()",
        "    words, codes, counts = borrowed(words), borrowed(codes), borrowed(counts)",
        "    replicas, weights = borrowed(replicas), borrowed(weights)",
        *(f"    a{i} = borrowed(a{i})" for i in arrays),
        "    own = np.empty((ROWS + 3, BLOCK), np.float32)",
        "    scratch = borrowed(own)",
        "    values, loose, sums = row(scratch, ROWS + 2), as_bytes(row(scratch, ROWS + 1)), row(scratch, ROWS)",
        "    for block in range(begin, end):",
        "        start = block * BLOCK",
        "        sent = part(values, 0, own_size(counts, block, min(BLOCK, n - start)))",
        "        here = part(codes, block * STRIDE, min((block + 1) * STRIDE, codes.size))",
        *(f"        ask_for(a{i}, start, BLOCK)" for i in arrays),
        *(f"        b{i} = part(a{i}, start, start + sent.size)" for i in arrays),
    ]
    if summed:
        lines += [
            f"        b{last} = part(sums, 0, sent.size)",
            f"        sum_rows(replicas, weights, start, b{last}, divisor)",
        ]
    loads = [f"            v{i} = load_{i}(b{i}[i])" for i in arrays] + [f"            v{last} = b{last}[i]"] * summed
    lines += ["        for i in range(sent.size):", *loads]
    if before:
        lines.append(f"            {before}")
        for i in message.before_writes:
            lines += [
                f"            u{i} = store_{i}(r{i})",
                f"            b{i}[i] = u{i}",
                f"            v{i} = load_{i}(u{i})",
            ]
    lines += [
        f"            sent[i] = {value}",
        "        encode_block(sent, words, here, scratch, block, start, seed_low, seed_high)",
    ]
    if after:
        lines += [
            "        decode_block(words, here, sent, loose, block)",
            "        for i in range(sent.size):",
            "            d = sent[i]",
            *loads,
            f"            {after}",
            *(f"            b{i}[i] = store_{i}(r{i})" for i in message.after_writes),
        ]
    return "\n".join([*lines, "    keep(own)"]) + "\n"


def apply_source(update: ElementwiseRule, scalars: int, mixture: Mixture) -> str:
    """The text of the kernel that decodes and applies a rule of this number of arguments."""
    others = mixture.others(update)
    columns = [f"a{i}" for i in others] + [f"s{i}" for i in range(scalars)]
    arguments = ", ".join(["words, codes, weights, replicas, counts", *columns, "divisor, scale, n"])
    lines = [
        f"def apply_blocks({arguments}, begin, end, threads, launcher):",
        "    if shared(begin, end, threads, launcher):",
        "        return",
        "    wide_vectors()",
        "    words, codes, weights = borrowed(words), borrowed(codes), borrowed(weights)",
        "    replicas, counts = borrowed(replicas), borrowed(counts)",
        *(f"    a{i} = borrowed(a{i})" for i in others),
        f"    own = np.empty(({2 + len(mixture.each)}, BLOCK), np.float32)",
        "    scratch = borrowed(own)",
        "    totals, loose = row(scratch, 0), as_bytes(row(scratch, 1))",
        "    for block in range(begin, end):",
        "        start = block * BLOCK",
        "        total = part(totals, 0, own_size(counts, block, min(BLOCK, n - start)))",
        *(f"        ask_for(a{i}, start, BLOCK)" for i in others),
        "        sum_block(words, codes, weights, replicas, start, total, loose, divisor, scale, block)",
    ]
    for j, position in enumerate(mixture.each):
        lines += [
            f"        b{position} = part(row(scratch, {2 + j}), 0, total.size)",
            f"        here = part(row(codes, {j}), block * STRIDE, min((block + 1) * STRIDE, codes.shape[1]))",
            f"        decode_block(row(words, {j}), here, b{position}, part(loose, 0, BLOCK), block)",
        ]
    if update.writes:
        lines += [
            *(f"        b{i} = part(a{i}, start, start + total.size)" for i in others),
            "        for i in range(total.size):",
            f"            v{mixture.position} = total[i]",
            *(f"            v{position} = b{position}[i]" for position in mixture.each),
            *(f"            v{i} = load_{i}(b{i}[i])" for i in others),
            f"            {call_lines(update, scalars)}",
            *(f"            b{i}[i] = store_{i}(r{i})" for i in update.writes),
        ]
    return "\n".join([*lines, "    keep(own)"]) + "\n"


def conversions(places: Any, dtypes: tuple[torch.dtype, ...]) -> dict[str, Any]:
    """How the arrays at some places of a rule are read and written."""
    found: dict[str, Any] = {}
    for i, dtype in zip(places, dtypes, strict=True):
        found |= {f"load_{i}": LOAD[dtype], f"store_{i}": STORE[dtype]}
    return found


@functools.cache
def message_kernel(
    rule: BlockQuantizer,
    block: int,
    message: MessageRule,
    dtypes: tuple[torch.dtype, ...],
    stochastic: bool,
    rows: RowSum | None,
) -> Any:
    """The kernel that encodes what a rule computes."""
    modes = {} if rows is None else {"weighted": rows.weighted, "divided": rows.divided}
    bindings = bound(rule, block, torch.float32, torch.float32, stochastic, **modes)
    bindings = bindings | {"before": message.before, "value": message.value, "after": message.after}
    if rows is not None:
        bindings["sum_rows"] = compile_template(sum_rows, bindings, helper=True)
    text = message_source(message, rows is not None)
    template = function_from_source(text, "message_blocks", NAMES, __file__)
    return compile_template(template, bindings | conversions(range(len(dtypes)), dtypes))


@functools.cache
def apply_kernel(
    rule: BlockQuantizer,
    block: int,
    update: ElementwiseRule,
    scalars: int,
    mixture: Mixture,
    dtypes: tuple[torch.dtype, ...],
    fours: bool,
) -> Any:
    """The kernel that decodes and applies a rule."""
    modes = {"weighted": mixture.weighted, "divided": mixture.divided, "tracked": mixture.tracked}
    bindings = bound(rule, block, torch.float32, torch.float32, fours=fours, **modes) | {"rule": update.function}
    text = apply_source(update, scalars, mixture)
    template = function_from_source(text, "apply_blocks", NAMES, __file__)
    return compile_template(template, bindings | conversions(mixture.others(update), dtypes))


def encode_rule(
    rule: BlockQuantizer,
    message: MessageRule,
    arrays: tuple[torch.Tensor, ...],
    scalars: tuple[float, ...],
    payload: torch.Tensor,
    form: BlockForm,
    seed: int | None,
    counts: torch.Tensor | None,
    rows: Rows | None,
) -> None:
    """See `bagua_kernels.launchers.blockwise.fusion.encode_rule`."""
    words, codes = map(array, form.parts(payload))
    dtypes = tuple(a.dtype for a in arrays)
    kernel = message_kernel(rule, form.block, message, dtypes, seed is not None, None if rows is None else rows.kind)
    columns = (*map(array, arrays), *map(np.float32, scalars))
    replicas, weights = (NO_REPLICAS, Weights()) if rows is None else (array(rows.replicas), rows.weights)
    given = (counts_array(counts), replicas, weights_array(weights, len(replicas)), np.float32(weights.divisor))
    over_blocks(kernel, form, words, codes, *given, *columns, form.n, *map(np.uint32, seed_halves(seed)))
    clear_pads(words, codes, form)


def decode_apply(
    rule: BlockQuantizer,
    update: ElementwiseRule,
    mixture: Mixture,
    sources: Sources,
    arrays: tuple[torch.Tensor, ...],
    scalars: tuple[float, ...],
    form: BlockForm,
) -> None:
    """See `bagua_kernels.launchers.blockwise.fusion.decode_apply`."""
    words, codes = map(array, sources.whole.parts(sources.payloads, sources.first))
    ranks = len(sources.payloads)
    fours = ranks >= 4 and not mixture.tracked
    kernel = apply_kernel(rule, form.block, update, len(scalars), mixture, tuple(a.dtype for a in arrays), fours)
    replicas = NO_REPLICAS if sources.replicas is None else array(sources.replicas)
    columns = (*map(array, arrays), *map(np.float32, scalars))
    given = (weights_array(sources.weights, ranks), replicas, counts_array(sources.counts))
    numbers = np.float32(sources.weights.divisor), np.float32(sources.scale)
    over_blocks(kernel, form, words, codes, *given, *columns, *numbers, form.n)
