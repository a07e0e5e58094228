"""Block quantizers on the CPU: what their templates are bound to, and how they are launched."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch

from bagua_kernels.jit._numba_cpu import LOAD, STORE, array, compile_template, run_parallel, runs_alone
from bagua_kernels.jit._numba_cpu_intrinsics import POINTER, borrowed, keep, packing, wide_vectors
from bagua_kernels.jit.source import function_from_source
from bagua_kernels.launchers.arguments import seed_halves
from bagua_kernels.launchers.blockwise._numba_cpu_block import EXTREMES, LAYERS
from bagua_kernels.launchers.blockwise._numba_cpu_loops import TEMPLATES
from bagua_kernels.launchers.blockwise.bindings import piece_table, rule_bindings, rule_constants
from bagua_kernels.launchers.blockwise.form import BlockForm
from bagua_kernels.launchers.elementwise import call_lines
from bagua_kernels.rules.optimizers import ElementwiseRule
from bagua_kernels.rules.quantizers import BlockQuantizer

# Elements a task: large enough to hide the cost of a task, small enough for an even split over threads.
TASK = 16384
# Kernels that quantize what they have summed up themselves, in float32, whatever they read or write.
INTERMEDIATE = ("encode_pieces", "feedback", "decode_sum", "reduce", "decode_apply")


@functools.cache
def bound(
    rule: BlockQuantizer,
    block: int,
    inner: torch.dtype,
    outer: torch.dtype,
    stochastic: bool = False,
    given: bool = False,
    fours: bool = False,
) -> dict[str, Any]:
    """What the names in the templates stand for, for blocks of one dtype inside and vectors of another outside."""
    form = BlockForm(0, block, rule.words, rule.bits)
    bindings: dict[str, Any] = {
        "BLOCK": block,
        "STRIDE": form.stride,
        "STOCHASTIC": stochastic,
        "GIVEN": given,
        "FOURS": fours,
        "load": LOAD[inner],
        "store": STORE[inner],
        "load_input": LOAD[outer],
        "store_output": STORE[outer],
        "pointer": POINTER[outer],
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
def kernels(
    name: str,
    rule: BlockQuantizer,
    block: int,
    dtype: torch.dtype,
    stochastic: bool = False,
    given: bool = False,
    fours: bool = False,
) -> tuple[Any, Any]:
    """The serial and the parallel form of a kernel; `fours` is True for payloads of four ranks or more."""
    bindings = bound(rule, block, torch.float32 if name in INTERMEDIATE else dtype, dtype, stochastic, given, fours)
    over_blocks, over_tasks = TEMPLATES[name]
    serial = compile_template(over_blocks, bindings)
    return serial, compile_template(over_tasks, {"serial": serial}, parallel=True)


def apply_source(update: ElementwiseRule, scalars: int, position: int) -> str:
    """The text of the serial and the parallel kernel that decode and apply a rule of this number of arguments."""
    others = [i for i in range(update.arrays) if i != position]
    arguments = ", ".join([f"a{i}" for i in others] + [f"s{i}" for i in range(scalars)])
    lines = [
        f"def apply_blocks(words, codes, {arguments}, scale, n, begin, end):",
        "    wide_vectors()",
        "    words, codes = borrowed(words), borrowed(codes)",
        "    own = np.empty((2, BLOCK), np.float32)",
        "    scratch = borrowed(own)",
        "    totals, loose = scratch[0], scratch[1].view(np.uint8)",
        "    for block in range(begin, end):",
        "        start = block * BLOCK",
        "        total = totals[: min(BLOCK, n - start)]",
        "        sum_block(words, codes, total, loose, scale, block)",
    ]
    for i in others:
        lines += [f"        ask_for(a{i}, start, BLOCK)", f"        b{i} = a{i}[start : start + total.size]"]
    lines += ["        for i in range(total.size):", f"            v{position} = total[i]"]
    lines += [f"            v{i} = load_{i}(b{i}[i])" for i in others]
    lines += [f"            {call_lines(update, scalars)}"]
    lines += [f"            b{i}[i] = store_{i}(r{i})" for i in update.writes]
    lines += ["    keep(own)"]
    lines += [
        f"def apply_tasks(words, codes, {arguments}, scale, n, blocks, task):",
        "    for t in numba.prange((blocks + task - 1) // task):",
        f"        serial(words, codes, {arguments}, scale, n, t * task, min((t + 1) * task, blocks))",
    ]
    return "\n".join(lines) + "\n"


@functools.cache
def apply_kernels(
    rule: BlockQuantizer,
    block: int,
    update: ElementwiseRule,
    scalars: int,
    position: int,
    dtypes: tuple[torch.dtype, ...],
    fours: bool,
) -> tuple[Any, Any]:
    """The serial and the parallel kernel that decode and apply a rule."""
    bindings = bound(rule, block, torch.float32, torch.float32, fours=fours) | {"rule": update.function}
    others = [i for i in range(update.arrays) if i != position]
    for i, dtype in zip(others, dtypes, strict=True):
        bindings |= {f"load_{i}": LOAD[dtype], f"store_{i}": STORE[dtype]}
    text = apply_source(update, scalars, position)
    names = {
        "__name__": __name__,
        "numba": numba,
        "np": np,
        "borrowed": borrowed,
        "keep": keep,
        "wide_vectors": wide_vectors,
    }
    serial = compile_template(function_from_source(text, "apply_blocks", names, __file__), bindings)
    over_tasks = function_from_source(text, "apply_tasks", names, __file__)
    return serial, compile_template(over_tasks, {"serial": serial}, parallel=True)


def run(kernel: tuple[Any, Any], form: BlockForm, *arguments: Any) -> None:
    """Calls the kernel over all blocks, on one thread if that is as fast."""
    serial, parallel = kernel
    if runs_alone(form.n):
        serial(*arguments, 0, form.blocks)
    else:
        run_parallel(parallel, *arguments, form.blocks, max(1, TASK // form.block))


NO_COUNTS = np.empty(0, np.int32)


def counts_array(counts: torch.Tensor | None) -> Any:
    """The counts as an array, which is empty where there are none: one kernel does for both."""
    return NO_COUNTS if counts is None else array(counts)


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
    kernel = kernels("encode", rule, form.block, x.dtype, seed is not None, given)
    run(kernel, form, array(x), words, codes, counts_array(counts), *map(np.uint32, seed_halves(seed)))
    clear_pads(words, codes, form)


def encode_pieces(
    rule: BlockQuantizer, pieces: Sequence[torch.Tensor], payload: torch.Tensor, form: BlockForm, seed: int | None
) -> None:
    """See `bagua_kernels.launchers.blockwise.encode_pieces`."""
    words, codes = map(array, form.parts(payload))
    addresses, sizes, firsts = piece_table(pieces, form.block)
    kernel = kernels("encode_pieces", rule, form.block, pieces[0].dtype, seed is not None)
    run(kernel, form, addresses, sizes, firsts, words, codes, *map(np.uint32, seed_halves(seed)))
    clear_pads(words, codes, form)


def feedback(
    rule: BlockQuantizer,
    x: torch.Tensor,
    residual: torch.Tensor,
    payload: torch.Tensor,
    form: BlockForm,
    factor: float,
    seed: int | None,
    counts: torch.Tensor | None = None,
) -> None:
    """See `bagua_kernels.launchers.blockwise.feedback`."""
    words, codes = map(array, form.parts(payload))
    kernel = kernels("feedback", rule, form.block, x.dtype, seed is not None)
    halves = map(np.uint32, seed_halves(seed))
    arguments = (array(x), array(residual), words, codes, counts_array(counts), np.float32(factor))
    run(kernel, form, *arguments, *halves)
    clear_pads(words, codes, form)


def decode(rule: BlockQuantizer, payload: torch.Tensor, out: torch.Tensor, form: BlockForm) -> None:
    """See `bagua_kernels.launchers.blockwise.decode`."""
    words, codes = map(array, form.parts(payload))
    run(kernels("decode", rule, form.block, out.dtype), form, words, codes, array(out))


def decode_sum(rule: BlockQuantizer, payloads: torch.Tensor, out: torch.Tensor, scale: float, form: BlockForm) -> None:
    """See `bagua_kernels.launchers.blockwise.decode_sum`."""
    words, codes = map(array, form.parts(payloads))
    kernel = kernels("decode_sum", rule, form.block, out.dtype, fours=len(payloads) >= 4)
    run(kernel, form, words, codes, array(out), np.float32(scale))


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
    kernel = kernels("reduce", rule, form.block, torch.float32, seed is not None, fours=len(payloads) >= 4)
    arguments = (words, codes, out_words, out_codes, counts_array(counts), np.float32(scale), form.n)
    run(kernel, form, *arguments, *map(np.uint32, seed_halves(seed)))
    clear_pads(out_words, out_codes, form)


def decode_apply(
    rule: BlockQuantizer,
    payloads: torch.Tensor,
    update: ElementwiseRule,
    arrays: tuple[torch.Tensor, ...],
    scalars: tuple[float, ...],
    scale: float,
    form: BlockForm,
    position: int,
    whole: BlockForm,
    first: int,
) -> None:
    """See `bagua_kernels.launchers.blockwise.decode_apply`."""
    words, codes = map(array, whole.parts(payloads, first))
    dtypes = tuple(a.dtype for a in arrays)
    kernel = apply_kernels(rule, form.block, update, len(scalars), position, dtypes, len(payloads) >= 4)
    run(kernel, form, words, codes, *map(array, arrays), *map(np.float32, scalars), np.float32(scale), form.n)
