"""Block quantizers on the CPU: what their templates are bound to, and how they are launched."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit._numba_cpu import LOAD, STORE, array, compile_template
from bagua_kernels.jit._numba_cpu_intrinsics import VECTOR, VIEW, packing
from bagua_kernels.jit._numba_cpu_threads import run_all
from bagua_kernels.launchers.arguments import Weights, seed_halves
from bagua_kernels.launchers.blockwise._numba_cpu_block import EXTREMES, LAYERS
from bagua_kernels.launchers.blockwise._numba_cpu_loops import TEMPLATES
from bagua_kernels.launchers.blockwise.bindings import piece_table, rule_bindings, rule_constants
from bagua_kernels.launchers.blockwise.form import BlockForm
from bagua_kernels.launchers.blockwise.rows import Rows, decode_in_turn, encode_in_turn
from bagua_kernels.rules.quantizers import BlockQuantizer

# Kernels that quantize what they have summed up themselves, in float32, whatever they read or write.
INTERMEDIATE = ("encode_pieces", "encode_pieces_rows", "decode_sum", "reduce")


@functools.cache
def bound(
    rule: BlockQuantizer,
    block: int,
    inner: torch.dtype,
    outer: torch.dtype,
    stochastic: bool = False,
    given: bool = False,
    fours: bool = False,
    weighted: bool = False,
    divided: bool = False,
    tracked: bool = False,
) -> dict[str, Any]:
    """What the names in the templates stand for, for blocks of one dtype inside and vectors of another outside."""
    form = BlockForm(0, block, rule.words, rule.bits)
    bindings: dict[str, Any] = {
        "BLOCK": block,
        "STRIDE": form.stride,
        # Of scratch memory that a block's statistics take.
        "ROWS": max(rule.sums, 1),
        "STOCHASTIC": stochastic,
        "GIVEN": given,
        "FOURS": fours,
        "WEIGHTED": weighted,
        "DIVIDED": divided,
        "TRACKED": tracked,
        "load": LOAD[inner],
        "store": STORE[inner],
        "load_input": LOAD[outer],
        "store_output": STORE[outer],
        "vector": VECTOR[outer],
        "as_output": VIEW[outer],
        **rule_constants(rule),
        **rule_bindings(rule),
    }
    if form.fields > 1:
        bindings["pack"], bindings["unpack"] = packing(form.fields, form.stride)
    bindings["extremes_of"] = compile_template(EXTREMES[rule.extremes], bindings, helper=True)
    for layer in LAYERS:
        bindings |= {template.__name__: compile_template(template, bindings, helper=True) for template in layer}
    return bindings


@functools.cache
def kernel(
    name: str,
    rule: BlockQuantizer,
    block: int,
    dtype: torch.dtype,
    stochastic: bool = False,
    given: bool = False,
    fours: bool = False,
    weighted: bool = False,
    divided: bool = False,
) -> Any:
    """The kernel over a range of blocks; `fours` is True for payloads of four ranks or more."""
    inner = torch.float32 if name in INTERMEDIATE else dtype
    bindings = bound(rule, block, inner, dtype, stochastic, given, fours, weighted, divided)
    return compile_template(TEMPLATES[name], bindings)


def over_blocks(compiled: Any, form: BlockForm, *arguments: Any) -> None:
    """Calls a kernel over all blocks."""
    run_all(compiled, arguments, form.blocks, form.n)


NO_COUNTS = np.empty(0, np.int32)


def counts_array(counts: torch.Tensor | None) -> Any:
    """The counts as an array, which is empty where there are none: one kernel does for both."""
    return NO_COUNTS if counts is None else array(counts)


def weights_array(weights: Weights, ranks: int) -> Any:
    """The factors as an array; ones where there are none, which kernels without weights do not read."""
    return np.ones(ranks, np.float32) if weights.factors is None else array(weights.factors)


def clear_pads(words: Any, codes: Any, form: BlockForm) -> None:
    """Zeroes the bytes after the scales and after the codes."""
    words[form.blocks * form.words :] = 0
    codes[form.used_code_bytes :] = 0


def encode(
    rule: BlockQuantizer,
    x: torch.Tensor,
    payload: torch.Tensor,
    form: BlockForm,
    seed: int | None,
    given: bool,
    counts: torch.Tensor | None = None,
) -> None:
    """See `bagua_kernels.launchers.blockwise.encode`."""
    words, codes = map(array, form.parts(payload))
    compiled = kernel("encode", rule, form.block, x.dtype, seed is not None, given)
    over_blocks(compiled, form, array(x), words, codes, counts_array(counts), *map(np.uint32, seed_halves(seed)))
    clear_pads(words, codes, form)


def encode_pieces(
    rule: BlockQuantizer, pieces: Sequence[torch.Tensor], payload: torch.Tensor, form: BlockForm, seed: int | None
) -> None:
    """See `bagua_kernels.launchers.blockwise.encode_pieces`."""
    words, codes = map(array, form.parts(payload))
    addresses, sizes, firsts = piece_table(pieces, form.block)
    compiled = kernel("encode_pieces", rule, form.block, pieces[0].dtype, seed is not None)
    over_blocks(compiled, form, addresses, sizes, firsts, words, codes, *map(np.uint32, seed_halves(seed)))
    clear_pads(words, codes, form)


def decode(rule: BlockQuantizer, payload: torch.Tensor, out: torch.Tensor, form: BlockForm) -> None:
    """See `bagua_kernels.launchers.blockwise.decode`."""
    words, codes = map(array, form.parts(payload))
    over_blocks(kernel("decode", rule, form.block, out.dtype), form, words, codes, array(out))


def decode_sum(
    rule: BlockQuantizer,
    payloads: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    form: BlockForm,
    weights: Weights,
) -> None:
    """See `bagua_kernels.launchers.blockwise.decode_sum`."""
    words, codes = map(array, form.parts(payloads))
    modes = {"weighted": weights.factors is not None, "divided": weights.divisor != 1.0}
    compiled = kernel("decode_sum", rule, form.block, out.dtype, fours=len(payloads) >= 4, **modes)
    numbers = np.float32(weights.divisor), np.float32(scale)
    over_blocks(compiled, form, words, codes, weights_array(weights, len(payloads)), array(out), *numbers)


def reduce(
    rule: BlockQuantizer,
    payloads: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    form: BlockForm,
    seed: int | None,
    counts: torch.Tensor | None = None,
) -> None:
    """See `bagua_kernels.launchers.blockwise.reduce`."""
    words, codes = map(array, form.parts(payloads))
    out_words, out_codes = map(array, form.parts(out))
    compiled = kernel("reduce", rule, form.block, torch.float32, seed is not None, fours=len(payloads) >= 4)
    outputs = (out_words, out_codes, counts_array(counts), np.float32(scale), form.n)
    over_blocks(
        compiled,
        form,
        words,
        codes,
        weights_array(Weights(), len(payloads)),
        *outputs,
        *map(np.uint32, seed_halves(seed)),
    )
    clear_pads(out_words, out_codes, form)


def encode_rows(
    rule: BlockQuantizer,
    x: torch.Tensor,
    payloads: torch.Tensor,
    rows: Rows,
    block: int,
    seeds: Sequence[int] | None,
    counts: torch.Tensor | None,
) -> None:
    """See `bagua_kernels.launchers.blockwise.encode_rows`: a launch for all full chunks, and one for a short one."""
    if full := rows.full:
        form = BlockForm(rows.width, block, rule.words, rule.bits)
        words, codes = map(array, form.parts(payloads[:full, : form.size]))
        compiled = kernel("encode_rows", rule, block, x.dtype, seeds is not None)
        arguments = (array(x), words, codes, counts_array(counts), _seed_table(seeds, full), rows.span, rows.width)
        run_all(compiled, arguments, full * form.blocks, full * form.n)
        _clear_pads_of_rows(words, codes, form)
    encode_in_turn(encode, rule, x, payloads, rows, block, seeds, counts, first=full)


def encode_rows_of_pieces(
    rule: BlockQuantizer,
    pieces: Sequence[Sequence[torch.Tensor]],
    payloads: torch.Tensor,
    form: BlockForm,
    seeds: Sequence[int] | None,
) -> None:
    """See `bagua_kernels.launchers.blockwise.encode_rows_of_pieces`."""
    words, codes = map(array, form.parts(payloads))
    together = [piece for each in pieces for piece in each]
    addresses, sizes, firsts = piece_table(together, form.block)
    compiled = kernel("encode_pieces_rows", rule, form.block, together[0].dtype, seeds is not None)
    arguments = (addresses, sizes, firsts, words, codes, _seed_table(seeds, len(pieces)), form.blocks)
    run_all(compiled, arguments, len(pieces) * form.blocks, len(pieces) * form.n)
    _clear_pads_of_rows(words, codes, form)


def decode_rows(rule: BlockQuantizer, payloads: torch.Tensor, out: torch.Tensor, rows: Rows, block: int) -> None:
    """See `bagua_kernels.launchers.blockwise.decode_rows`: a launch for all full chunks, and one for a short one."""
    if full := rows.full:
        form = BlockForm(rows.width, block, rule.words, rule.bits)
        words, codes = map(array, form.parts(payloads[:full, : form.size]))
        compiled = kernel("decode_rows", rule, block, out.dtype)
        run_all(compiled, (words, codes, array(out), rows.span, rows.width), full * form.blocks, full * form.n)
    decode_in_turn(decode, rule, payloads, out, rows, block, first=full)


def _seed_table(seeds: Sequence[int] | None, count: int) -> Any:
    """The low and high halves of some seeds, shape (count, 2), uint32."""
    if seeds is None:
        return np.zeros((count, 2), np.uint32)
    return np.array(seeds[:count], np.uint64).view(np.uint32).reshape(count, 2)


def _clear_pads_of_rows(words: Any, codes: Any, form: BlockForm) -> None:
    words[:, form.blocks * form.words :] = 0
    codes[:, form.used_code_bytes :] = 0
