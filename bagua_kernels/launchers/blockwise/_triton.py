"""Block quantizers in Triton: what their templates are bound to, and how they are launched."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton

from bagua_kernels.jit._triton import EXACT, LOAD, STORE, bits, compile_template, constant, on_device, signed
from bagua_kernels.launchers.arguments import Weights, seed_halves
from bagua_kernels.launchers.blockwise._triton_kernels import FUNCTIONS, TEMPLATES
from bagua_kernels.launchers.blockwise.bindings import piece_table, rule_bindings, rule_constants
from bagua_kernels.launchers.blockwise.form import BlockForm, form_of
from bagua_kernels.launchers.blockwise.rows import Rows, encode_pieces_in_turn
from bagua_kernels.rules.quantizers import BlockQuantizer
from bagua_kernels.upload import uploaded

# Each element of a piece has an address of 64 bits of its own; the assembler would rather spill than lower its occupancy.
PIECES = {"maxnreg": 255}
UNSPECIALIZED = ("seed_low", "seed_high", "scale", "divisor")


@functools.cache
def bound(rule: BlockQuantizer, dtype: torch.dtype) -> dict[str, Any]:
    """What the names in the templates stand for."""
    bindings: dict[str, Any] = {
        **{f"N_{name}": constant(value) for name, value in rule_constants(rule).items()},
        "load": LOAD[dtype],
        "store": STORE[dtype],
        **rule_bindings(rule),
    }
    for function in FUNCTIONS:
        bindings[function.__name__] = compile_template(function, bindings)
    return bindings


@functools.cache
def kernel(name: str, rule: BlockQuantizer, dtype: torch.dtype) -> Any:
    """The compiled kernel; Triton specialises it further by its constexpr arguments."""
    template = TEMPLATES[name]
    unspecialized = [a for a in UNSPECIALIZED if a in template.__code__.co_varnames]
    return compile_template(template, bound(rule, dtype), unspecialized)


def tile(rule: BlockQuantizer, block: int) -> dict[str, int]:
    """The tile's rows and warps. A thread has 32 elements, or 16 where packing or sums need registers: then nothing spills."""
    elements = 32 if rule.bits == 8 and rule.sums == 0 else 16
    rows = max(1, 128 * elements // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": max(4, rows * block // (32 * elements))}


def launch(
    kernel: Any, rule: BlockQuantizer, form: BlockForm, device: torch.Tensor, *arguments: Any, **constants: Any
) -> None:
    """Launches one program for each tile of blocks; the pad of the scales counts as blocks."""
    shape = tile(rule, form.block)
    rows = form.scale_bytes // (4 * form.words)
    with on_device(device):
        kernel[(triton.cdiv(rows, shape["ROWS"]),)](*arguments, **constants, **shape, **EXACT)


def or_any(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """What a kernel gets for a tensor: where there is none it reads none, and any other does."""
    return other if tensor is None else tensor


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
    words, codes = form.parts(payload)
    arguments = (bits(x), words, codes, or_any(counts, words), form.n, *map(signed, seed_halves(seed)))
    modes = {"STOCHASTIC": seed is not None, "GIVEN": given, "COUNTED": counts is not None}
    launch(kernel("encode", rule, x.dtype), rule, form, x, *arguments, **modes)


def encode_pieces(
    rule: BlockQuantizer, pieces: Sequence[torch.Tensor], payload: torch.Tensor, form: BlockForm, seed: int | None
) -> None:
    """See `bagua_kernels.launchers.blockwise.encode_pieces`."""
    addresses, sizes, firsts = piece_table(pieces, form.block)
    piece_of_block = np.repeat(np.arange(len(pieces)), np.diff(firsts))
    tables = [uploaded(table, payload.device) for table in (addresses, sizes, firsts, piece_of_block)]
    arguments = (*form.parts(payload), form.n, *map(signed, seed_halves(seed)))
    run = kernel("encode_pieces", rule, pieces[0].dtype)
    launch(run, rule, form, payload, *tables, bits(pieces[0]), *arguments, STOCHASTIC=seed is not None, **PIECES)


def decode(rule: BlockQuantizer, payload: torch.Tensor, out: torch.Tensor, form: BlockForm) -> None:
    """See `bagua_kernels.launchers.blockwise.decode`."""
    launch(kernel("decode", rule, out.dtype), rule, form, out, *form.parts(payload), bits(out), form.n)


def decode_sum(
    rule: BlockQuantizer,
    payloads: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    form: BlockForm,
    weights: Weights,
) -> None:
    """See `bagua_kernels.launchers.blockwise.decode_sum`."""
    words, codes = form.parts(payloads)
    sources = (words, codes, or_any(weights.factors, words), bits(out), payloads.shape[0], payloads.stride(0))
    modes = {"WEIGHTED": weights.factors is not None, "DIVIDED": weights.divisor != 1.0}
    launch(kernel("decode_sum", rule, out.dtype), rule, form, out, *sources, form.n, weights.divisor, scale, **modes)


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
    words, codes = form.parts(out)
    parts = (*form.parts(payloads), words, codes, or_any(counts, words))
    arguments = (*parts, payloads.shape[0], payloads.stride(0), form.n, scale, *map(signed, seed_halves(seed)))
    modes = {"STOCHASTIC": seed is not None, "COUNTED": counts is not None}
    launch(kernel("reduce", rule, torch.float32), rule, form, out, *arguments, **modes)


# See `bagua_kernels.launchers.blockwise.encode_rows_of_pieces`.
encode_rows_of_pieces = functools.partial(encode_pieces_in_turn, encode_pieces)


def encode_rows(
    rule: BlockQuantizer,
    x: torch.Tensor,
    payloads: torch.Tensor,
    rows: Rows,
    block: int,
    seeds: Sequence[int] | None,
    counts: torch.Tensor | None,
) -> None:
    """See `bagua_kernels.launchers.blockwise.encode_rows`."""
    form = form_of(rule, rows.width, block)
    words, _ = form.parts(payloads)
    table = words
    if seeds is not None:
        halves = np.array([seed_halves(seed) for seed in seeds], np.uint32)
        table = uploaded(halves.view(np.int32), payloads.device)
    modes = {"STOCHASTIC": seeds is not None, "COUNTED": counts is not None}
    _launch_rows(
        "encode_rows",
        rule,
        x.dtype,
        form,
        x,
        rows,
        payloads,
        bits(x),
        words,
        payloads,
        or_any(counts, words),
        table,
        **modes,
    )


def decode_rows(rule: BlockQuantizer, payloads: torch.Tensor, out: torch.Tensor, rows: Rows, block: int) -> None:
    """See `bagua_kernels.launchers.blockwise.decode_rows`."""
    form = form_of(rule, rows.width, block)
    words, _ = form.parts(payloads)
    _launch_rows("decode_rows", rule, out.dtype, form, out, rows, payloads, words, payloads, bits(out))


def _launch_rows(
    name: str,
    rule: BlockQuantizer,
    dtype: torch.dtype,
    form: BlockForm,
    device: torch.Tensor,
    rows: Rows,
    payloads: torch.Tensor,
    *arguments: Any,
    **modes: Any,
) -> None:
    """Launches one program for each tile of blocks of each chunk."""
    shape = tile(rule, form.block)
    blocks = form.scale_bytes // (4 * form.words)
    even = rows.total % 16 == 0 and rows.width % 16 == 0
    where = rows.total, rows.span, rows.width, payloads.stride(0)
    with on_device(device):
        kernel(name, rule, dtype)[(triton.cdiv(blocks, shape["ROWS"]), rows.count)](
            *arguments, *where, **modes, EVEN=even, **shape, **EXACT
        )
