"""Block quantizers in Numba-CUDA: what their templates are bound to, and how they are launched."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit._numba_cuda import LOAD, STORE, array, compile_template, launching
from bagua_kernels.launchers.arguments import Weights, padded, seed_halves
from bagua_kernels.launchers.blockwise._numba_cuda_kernels import DEVICE_FUNCTIONS, LANES, TEMPLATES, add, multiplied
from bagua_kernels.launchers.blockwise.bindings import rule_bindings, rule_constants
from bagua_kernels.launchers.blockwise.form import BlockForm
from bagua_kernels.launchers.blockwise.rows import decode_in_turn, encode_in_turn, encode_pieces_in_turn
from bagua_kernels.rules.quantizers import BlockQuantizer

# Kernels that quantize what they have summed up themselves, in float32, whatever they read or write.
INTERMEDIATE = ("decode_sum", "reduce")


def warps(block: int) -> int:
    """Warps of a thread block: 4, or fewer if their blocks' sums and summands would not fit into 32 KiB of shared memory."""
    return min(4, 4096 // block)


@functools.cache
def bound(
    rule: BlockQuantizer,
    block: int,
    inner: torch.dtype,
    outer: torch.dtype,
    stochastic: bool,
    given: bool,
    counted: bool = False,
    weighted: bool = False,
    divided: bool = False,
    tracked: bool = False,
) -> dict[str, Any]:
    """What the names in the templates stand for, for blocks of one dtype inside and vectors of another outside."""
    form = BlockForm(0, block, rule.words, rule.bits)
    bindings: dict[str, Any] = {
        "BLOCK": block,
        "STRIDE": form.stride,
        "WARPS": warps(block),
        "SUMMED": warps(block) * block,
        "STOCHASTIC": stochastic,
        "GIVEN": given,
        "COUNTED": counted,
        "WEIGHTED": weighted,
        "DIVIDED": divided,
        "TRACKED": tracked,
        "load": LOAD[inner],
        "store": STORE[inner],
        "load_input": LOAD[outer],
        "store_output": STORE[outer],
        "add": add,
        "multiplied": multiplied,
        **rule_constants(rule),
        **rule_bindings(rule),
    }
    for function in DEVICE_FUNCTIONS:
        bindings[function.__name__] = compile_template(function, bindings, device=True)
    return bindings


@functools.cache
def kernel(
    name: str,
    rule: BlockQuantizer,
    block: int,
    dtype: torch.dtype,
    stochastic: bool = False,
    given: bool = False,
    counted: bool = False,
    weighted: bool = False,
    divided: bool = False,
) -> Any:
    """The compiled kernel."""
    inner = torch.float32 if name in INTERMEDIATE else dtype
    bindings = bound(rule, block, inner, dtype, stochastic, given, counted, weighted, divided)
    return compile_template(TEMPLATES[name], bindings)


def launch(kernel: Any, form: BlockForm, *tensors_and_scalars: Any) -> None:
    """Launches one warp for each block."""
    first = next(t for t in tensors_and_scalars if isinstance(t, torch.Tensor))
    height = warps(form.block)
    with launching(first) as stream:
        arguments = [array(a) if isinstance(a, torch.Tensor) else a for a in tensors_and_scalars]
        kernel[-(-form.blocks // height), (LANES, height), stream](*arguments)


@functools.cache
def nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a kernel gets for a tensor that it does not read: memory of its own, since the simulator writes arguments back."""
    return torch.zeros(1, dtype=dtype, device=device)


def or_nothing(tensor: torch.Tensor | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor, or what stands for one that is not there."""
    return nothing(dtype, device) if tensor is None else tensor


def counted(counts: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """The counts, or what stands for none."""
    return or_nothing(counts, torch.int32, device)


def flat_parts(payloads: torch.Tensor, form: BlockForm, first: int = 0) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Contiguous views from a block's first scale and from its first code to the end, then the payloads' distance and number."""
    ranks, size = payloads.shape
    stride = payloads.stride(0)
    flat = payloads.as_strided((stride * (ranks - 1) + size if ranks else 0,), (1,))
    scales, codes = flat.view(torch.int32)[form.words * first :], flat[form.scale_bytes + first * form.stride :]
    return scales, codes, stride, ranks


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
    run = kernel("encode", rule, form.block, x.dtype, seed is not None, given, counts is not None)
    arguments = (x, *form.parts(payload), counted(counts, x.device), form.n, *seed_halves(seed))
    launch(run, form, *arguments)


def encode_pieces(
    rule: BlockQuantizer, pieces: Sequence[torch.Tensor], payload: torch.Tensor, form: BlockForm, seed: int | None
) -> None:
    """See `bagua_kernels.launchers.blockwise.encode_pieces`.

    The simulator has no addresses, so the pieces are laid out in a buffer first; the Triton backend has no such copy.
    """
    flat = torch.zeros(form.n, dtype=pieces[0].dtype, device=payload.device)
    counts = torch.full((form.blocks,), form.block, dtype=torch.int32)
    start = 0
    for piece in pieces:
        flat[start : start + piece.numel()] = piece
        start += padded(piece.numel(), form.block)
        if piece.numel() % form.block:
            counts[start // form.block - 1] = piece.numel() % form.block
    # waits: Numba-CUDA copies pieces before it encodes them.
    encode(rule, flat, payload, form, seed, False, counts.to(payload.device))


def decode(rule: BlockQuantizer, payload: torch.Tensor, out: torch.Tensor, form: BlockForm) -> None:
    """See `bagua_kernels.launchers.blockwise.decode`."""
    launch(kernel("decode", rule, form.block, out.dtype), form, *form.parts(payload), out)


def decode_sum(
    rule: BlockQuantizer,
    payloads: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    form: BlockForm,
    weights: Weights,
) -> None:
    """See `bagua_kernels.launchers.blockwise.decode_sum`."""
    modes = {"weighted": weights.factors is not None, "divided": weights.divisor != 1.0}
    run = kernel("decode_sum", rule, form.block, out.dtype, **modes)
    factors = or_nothing(weights.factors, torch.float32, out.device)
    launch(run, form, *flat_parts(payloads, form), factors, out, np.float32(weights.divisor), np.float32(scale))


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
    run = kernel("reduce", rule, form.block, torch.float32, seed is not None, counted=counts is not None)
    arguments = (*flat_parts(payloads, form), *form.parts(out), counted(counts, out.device))
    launch(run, form, *arguments, np.float32(scale), form.n, *seed_halves(seed))


# See `bagua_kernels.launchers.blockwise.encode_rows` and `decode_rows`.
encode_rows = functools.partial(encode_in_turn, encode)
encode_rows_of_pieces = functools.partial(encode_pieces_in_turn, encode_pieces)
decode_rows = functools.partial(decode_in_turn, decode)
