"""Rules around a block quantizer in Numba-CUDA: a warp takes a block of every array."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit._numba_cuda import LOAD, STORE, compile_template
from bagua_kernels.jit._numba_cuda_package import cuda
from bagua_kernels.jit.source import function_from_source
from bagua_kernels.launchers.arguments import Weights, seed_halves
from bagua_kernels.launchers.blockwise._numba_cuda import bound, counted, flat_parts, launch, or_nothing
from bagua_kernels.launchers.blockwise._numba_cuda_kernels import LANES
from bagua_kernels.launchers.blockwise.form import BlockForm
from bagua_kernels.launchers.blockwise.fusion.sources import Mixture, Rows, RowSum, Sources, message_lines
from bagua_kernels.launchers.elementwise import call_lines
from bagua_kernels.rules.messages import MessageRule
from bagua_kernels.rules.optimizers import ElementwiseRule
from bagua_kernels.rules.quantizers import BlockQuantizer

PLACES = [
    "    block_values = cuda.shared.array(SUMMED, np.float32)",
    "    warp, lane = cuda.threadIdx.y, cuda.threadIdx.x",
    "    block = cuda.blockIdx.x * WARPS + warp",
    "    shift = (block - warp) * BLOCK",
    "    start = block * BLOCK",
    "    stop = own_stop(counts, n, block)",
]


def sum_rows(replicas, weights, ranks, n, divisor, i):
    """The sum of element `i` of all replicas, in their order."""
    total = np.float32(0.0)
    for rank in range(ranks):
        value = replicas[rank * n + i]
        if WEIGHTED:
            value = multiplied(value, weights[rank])
        total = add(total, value)
    if DIVIDED:
        total = quotient(total, divisor)
    return total


def message_source(message: MessageRule, summed: bool) -> str:
    """The text of the kernel that encodes what a rule computes; `summed` is True if its last array is the sum of replicas."""
    arrays = range(message.arrays - summed)
    before, value, after = message_lines(message)
    columns = ", ".join([f"a{i}" for i in arrays] + [f"s{i}" for i in range(message.scalars)])
    loads = [f"v{i} = load_{i}(a{i}[i])" for i in arrays]
    if summed:
        loads.append(f"v{message.arrays - 1} = sum_rows(replicas, weights, ranks, n, divisor, i)")
    lines = [
        f"def message_kernel(words, codes, counts, replicas, weights, ranks, divisor, {columns}, n, seed_low, seed_high):",
        *PLACES,
        "    for i in range(start + lane, stop, LANES):",
        *(f"        {load}" for load in loads),
    ]
    if before:
        lines.append(f"        {before}")
        for i in message.before_writes:
            lines += [f"        u{i} = store_{i}(r{i})", f"        a{i}[i] = u{i}", f"        v{i} = load_{i}(u{i})"]
    lines += [
        f"        block_values[i - shift] = {value}",
        "    encode_block(block_values, shift, words, codes, counts, n, seed_low, seed_high, warp, lane, block)",
    ]
    if after:
        lines += [
            "    # The codes of a byte come from several lanes' elements.",
            "    cuda.syncthreads()",
            "    if start < n:",
            "        at = block * WORDS",
            "        a, b, c, e = decode_constants(words[at], words[at + WORDS - 1], np.int32(LEVELS))",
            "        for i in range(start + lane, stop, LANES):",
            "            d = decoded(words, codes, at, block * STRIDE, i - start, a, b, c, e)",
            *(f"            {load}" for load in loads),
            f"            {after}",
            *(f"            a{i}[i] = store_{i}(r{i})" for i in message.after_writes),
        ]
    return "\n".join(lines) + "\n"


def apply_source(update: ElementwiseRule, scalars: int, mixture: Mixture) -> str:
    """The text of the kernel that decodes and applies a rule of this number of arguments."""
    others = mixture.others(update)
    columns = "".join([f"a{i}, " for i in others] + [f"s{i}, " for i in range(scalars)])
    lines = [
        f"def apply_kernel(words, codes, size, ranks, weights, replicas, counts, {columns}divisor, scale, n):",
        *PLACES,
        "    sum_block(block_values, shift, words, codes, weights, replicas, size, ranks, n, stop, divisor, scale, lane, block)",
    ]
    if not update.writes:
        return "\n".join(lines) + "\n"
    lines.append("    if start < n:")
    for j in range(len(mixture.each)):
        lines += [
            f"        at{j} = {j} * (size // 4) + block * WORDS",
            f"        p{j}, q{j}, x{j}, y{j} = decode_constants(words[at{j}], words[at{j} + WORDS - 1], np.int32(LEVELS))",
        ]
    lines += [
        "        for i in range(start + lane, stop, LANES):",
        f"            v{mixture.position} = block_values[i - shift]",
    ]
    for j, position in enumerate(mixture.each):
        at_code = f"{j} * size + block * STRIDE"
        lines.append(
            f"            v{position} = decoded(words, codes, at{j}, {at_code}, i - start, p{j}, q{j}, x{j}, y{j})"
        )
    lines += [f"            v{i} = load_{i}(a{i}[i])" for i in others]
    lines += [f"            {call_lines(update, scalars)}"]
    lines += [f"            a{i}[i] = store_{i}(r{i})" for i in update.writes]
    return "\n".join(lines) + "\n"


def compiled(text: str, name: str, bindings: dict[str, Any]) -> Any:
    """The kernel of a text."""
    names = {"__name__": __name__, "cuda": cuda, "np": np, "LANES": LANES}
    return compile_template(function_from_source(text, name, names), bindings)


def conversions(places: Iterable[int], dtypes: tuple[torch.dtype, ...]) -> dict[str, Any]:
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
    counts: bool,
    rows: RowSum | None = None,
) -> Any:
    """The compiled kernel that encodes what a rule computes."""
    modes = {} if rows is None else {"weighted": rows.weighted, "divided": rows.divided}
    bindings = bound(rule, block, torch.float32, torch.float32, stochastic, False, counts, **modes)
    bindings = bindings | {"before": message.before, "value": message.value, "after": message.after}
    if rows is not None:
        bindings["sum_rows"] = compile_template(sum_rows, bindings, device=True)
    text = message_source(message, rows is not None)
    return compiled(text, "message_kernel", bindings | conversions(range(len(dtypes)), dtypes))


@functools.cache
def apply_kernel(
    rule: BlockQuantizer,
    block: int,
    update: ElementwiseRule,
    scalars: int,
    mixture: Mixture,
    dtypes: tuple[torch.dtype, ...],
) -> Any:
    """The compiled kernel that decodes and applies a rule."""
    modes = {"counted": mixture.counted, "weighted": mixture.weighted, "divided": mixture.divided}
    modes |= {"tracked": mixture.tracked}
    bindings = bound(rule, block, torch.float32, torch.float32, False, False, **modes) | {"rule": update.function}
    text = apply_source(update, scalars, mixture)
    return compiled(text, "apply_kernel", bindings | conversions(mixture.others(update), dtypes))


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
    dtypes, device = tuple(a.dtype for a in arrays), payload.device
    kind = None if rows is None else rows.kind
    run = message_kernel(rule, form.block, message, dtypes, seed is not None, counts is not None, kind)
    replicas, weights = (None, Weights()) if rows is None else (rows.replicas, rows.weights)
    sources = (
        or_nothing(None if replicas is None else replicas.view(-1), torch.float32, device),
        or_nothing(weights.factors, torch.float32, device),
        0 if replicas is None else len(replicas),
        np.float32(weights.divisor),
    )
    columns = (*arrays, *map(np.float32, scalars))
    parts = form.parts(payload)
    launch(run, form, *parts, counted(counts, device), *sources, *columns, form.n, *seed_halves(seed))


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
    run = apply_kernel(rule, form.block, update, len(scalars), mixture, tuple(a.dtype for a in arrays))
    device = sources.payloads.device
    weights = or_nothing(sources.weights.factors, torch.float32, device)
    replicas = or_nothing(None if sources.replicas is None else sources.replicas.view(-1), torch.float32, device)
    parts = flat_parts(sources.payloads, sources.whole, sources.first)
    columns = (*arrays, *map(np.float32, scalars))
    numbers = np.float32(sources.weights.divisor), np.float32(sources.scale)
    launch(run, form, *parts, weights, replicas, counted(sources.counts, device), *columns, *numbers, form.n)
