"""Rules around a block quantizer in Triton: the tile of a program stays in registers from the first array to the last."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import triton.language as tl

from bagua_kernels.jit._triton import LOAD, STORE, bits, compile_template, signed
from bagua_kernels.jit.source import function_from_source
from bagua_kernels.launchers.arguments import Weights, seed_halves
from bagua_kernels.launchers.blockwise._triton import UNSPECIALIZED, bound, launch, or_any
from bagua_kernels.launchers.blockwise.form import BlockForm
from bagua_kernels.launchers.blockwise.fusion.sources import Mixture, Rows, Sources, message_lines
from bagua_kernels.launchers.elementwise import call_lines
from bagua_kernels.rules.messages import MessageRule
from bagua_kernels.rules.optimizers import ElementwiseRule
from bagua_kernels.rules.quantizers import BlockQuantizer

PLACES = [
    "    # A quotient rounded up overflows for lengths next to 2^31.",
    "    n = tl.cast(n, tl.int64)",
    "    rows, offsets, inside, byte_offsets = places(n, ROWS, BLOCK)",
    "    count, own = own_elements(counts_ptr, n, rows, offsets, inside, COUNTED)",
]


def stores(positions: Iterable[int], value: str) -> list[str]:
    """The lines that write the expression `value` of each position to its array; others than own elements stay u<position>."""
    lines = []
    for i in positions:
        lines += [
            f"    w{i} = {value.format(i=i)}",
            "    if COUNTED:",
            f"        w{i} = tl.where(own, w{i}, u{i})",
            f"    tl.store(a{i}_ptr + offsets, w{i}, mask=inside)",
        ]
    return lines


def message_source(message: MessageRule, summed: bool) -> str:
    """The text of the kernel that encodes what a rule computes; `summed` is True if its last array is the sum of replicas."""
    arrays, last = range(message.arrays - summed), message.arrays - 1
    before, value, after = message_lines(message)
    columns = ", ".join([f"a{i}_ptr" for i in arrays] + [f"s{i}" for i in range(message.scalars)])
    lines = [
        f"def message_kernel(words_ptr, codes_ptr, counts_ptr, replicas_ptr, weights_ptr, {columns}, ranks, span, divisor, n,",
        "    seed_low, seed_high, STOCHASTIC: tl.constexpr, WEIGHTED: tl.constexpr, DIVIDED: tl.constexpr,",
        "    COUNTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):",
        *PLACES,
    ]
    for i in arrays:
        lines += [f"    u{i} = tl.load(a{i}_ptr + offsets, mask=inside, other=0)", f"    v{i} = load_{i}(u{i})"]
    if summed:
        lines += [
            f"    v{last} = tl.zeros(offsets.shape, tl.float32)",
            "    for rank in range(ranks):",
            "        x = tl.load(replicas_ptr + tl.cast(rank, tl.int64) * span + offsets, mask=inside, other=0)",
            "        if WEIGHTED:",
            "            x = x * tl.load(weights_ptr + rank)",
            f"        v{last} += x",
            "    if DIVIDED:",
            f"        v{last} = tl.div_rn(v{last}, tl.zeros(offsets.shape, tl.float32) + divisor)",
        ]
    if before:
        lines += [f"    {before}", *stores(message.before_writes, "store_{i}(r{i})")]
        for i in message.before_writes:
            lines += [f"    u{i} = w{i}", f"    v{i} = load_{i}(u{i})"]
    lines += [
        "    codes, first, second = encode_tile(",
        f"        {value}, words_ptr, codes_ptr, n, rows, offsets, count, own, byte_offsets, seed_low, seed_high,",
        "        STOCHASTIC, False,",
        "    )",
    ]
    if after:
        lines += [
            "    b_a, b_b, b_c, b_d = decode_constants(wide(first), wide(second), N_LEVELS)",
            "    d = decode(with_sign(codes), b_a, b_b, b_c, b_d, N_LEVELS)",
            f"    {after}",
            *stores(message.after_writes, "store_{i}(r{i})"),
        ]
    return "\n".join(lines) + "\n"


def apply_source(update: ElementwiseRule, scalars: int, mixture: Mixture) -> str:
    """The text of the kernel that decodes and applies a rule of this number of arguments."""
    others = mixture.others(update)
    columns = "".join([f"a{i}_ptr, " for i in others] + [f"s{i}, " for i in range(scalars)])
    lines = [
        f"def apply_kernel(words_ptr, codes_ptr, weights_ptr, replicas_ptr, counts_ptr, {columns}ranks, size, span, n, divisor,",
        "    scale, WEIGHTED: tl.constexpr, DIVIDED: tl.constexpr, TRACKED: tl.constexpr, COUNTED: tl.constexpr,",
        "    ROWS: tl.constexpr, BLOCK: tl.constexpr):",
        *PLACES,
        f"    v{mixture.position} = decoded_sum(",
        "        words_ptr, codes_ptr, weights_ptr, replicas_ptr, ranks, size, span, n, divisor, scale, rows, offsets, inside,",
        "        own, byte_offsets, WEIGHTED, DIVIDED, TRACKED,",
        "    )",
    ]
    for j, position in enumerate(mixture.each):
        lines += [
            f"    at{j} = tl.cast({j}, tl.int64) * size",
            f"    v{position} = decoded_tile(",
            f"        words_ptr + at{j} // 4, codes_ptr + at{j}, n, rows, offsets, inside, byte_offsets",
            "    )",
        ]
    for i in others:
        lines += [f"    u{i} = tl.load(a{i}_ptr + offsets, mask=inside, other=0)", f"    v{i} = load_{i}(u{i})"]
    if update.writes:
        lines += [f"    {call_lines(update, scalars)}", *stores(update.writes, "store_{i}(r{i})")]
    return "\n".join(lines) + "\n"


def compiled(text: str, name: str, bindings: dict[str, Any], scalars: int) -> Any:
    """The kernel of a text."""
    template = function_from_source(text, name, {"__name__": __name__, "tl": tl})
    names = template.__code__.co_varnames
    unspecialized = [a for a in (*UNSPECIALIZED, *(f"s{i}" for i in range(scalars))) if a in names]
    return compile_template(template, bindings, unspecialized)


def conversions(places: Iterable[int], dtypes: tuple[torch.dtype, ...]) -> dict[str, Any]:
    """How the arrays at some places of a rule are read and written."""
    found: dict[str, Any] = {}
    for i, dtype in zip(places, dtypes, strict=True):
        found |= {f"load_{i}": LOAD[dtype], f"store_{i}": STORE[dtype]}
    return found


@functools.cache
def message_kernel(
    rule: BlockQuantizer, message: MessageRule, dtypes: tuple[torch.dtype, ...], summed: bool = False
) -> Any:
    """The compiled kernel that encodes what a rule computes; `summed` is True if its last array is the sum of replicas."""
    stages = {"before": message.before, "value": message.value, "after": message.after}
    bindings = bound(rule, torch.float32) | stages | conversions(range(len(dtypes)), dtypes)
    return compiled(message_source(message, summed), "message_kernel", bindings, message.scalars)


@functools.cache
def apply_kernel(
    rule: BlockQuantizer, update: ElementwiseRule, scalars: int, mixture: Mixture, dtypes: tuple[torch.dtype, ...]
) -> Any:
    """The compiled kernel that decodes and applies a rule."""
    bindings = bound(rule, torch.float32) | {"rule": update.function} | conversions(mixture.others(update), dtypes)
    return compiled(apply_source(update, scalars, mixture), "apply_kernel", bindings, scalars)


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
    words, codes = form.parts(payload)
    run = message_kernel(rule, message, tuple(a.dtype for a in arrays), rows is not None)
    replicas, weights = (None, Weights()) if rows is None else (rows.replicas, rows.weights)
    given = (or_any(tensor, words) for tensor in (counts, replicas, weights.factors))
    sizes = (0 if replicas is None else len(replicas), form.n, weights.divisor, form.n)
    modes = {"STOCHASTIC": seed is not None, "COUNTED": counts is not None}
    modes |= {"WEIGHTED": weights.factors is not None, "DIVIDED": weights.divisor != 1.0}
    halves = map(signed, seed_halves(seed))
    launch(run, rule, form, payload, words, codes, *given, *map(bits, arrays), *scalars, *sizes, *halves, **modes)


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
    payloads = sources.payloads
    words, codes = sources.whole.parts(payloads, sources.first)
    run = apply_kernel(rule, update, len(scalars), mixture, tuple(a.dtype for a in arrays))
    given = (or_any(tensor, words) for tensor in (sources.weights.factors, sources.replicas, sources.counts))
    sizes = (payloads.shape[0], payloads.stride(0), form.n, form.n, sources.weights.divisor, sources.scale)
    modes = {"WEIGHTED": mixture.weighted, "DIVIDED": mixture.divided}
    modes |= {"TRACKED": mixture.tracked, "COUNTED": mixture.counted}
    launch(run, rule, form, payloads, words, codes, *given, *map(bits, arrays), *scalars, *sizes, **modes)
