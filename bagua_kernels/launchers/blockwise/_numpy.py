"""Block quantizers in NumPy: their definition, on a matrix that has a row per block."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit._numpy import array, load, meant, plain, store
from bagua_kernels.launchers.arguments import Weights, seed_halves
from bagua_kernels.launchers.blockwise.form import BlockForm
from bagua_kernels.launchers.blockwise.rows import decode_in_turn, encode_in_turn, encode_pieces_in_turn
from bagua_kernels.rules.quantizers import BlockQuantizer
from bagua_kernels.rules.random import dither, random_bits, random_key
from bagua_kernels.rules.rounding import ordered, quotient

ZERO, NO_DITHER = np.float32(0.0), np.float32(-0.0)  # adding -0 leaves every float as it is


def in_blocks(values: Any, form: BlockForm) -> Any:
    """A float32 vector as a matrix with a row per block, filled up with zeros."""
    matrix = np.zeros((form.blocks, form.block), np.float32)
    matrix.reshape(-1)[: form.n] = values
    return matrix


def own_elements(form: BlockForm, counts: Any = None) -> Any:
    """True for each element of a matrix of blocks that is in the vector, and among the first `counts` of its block."""
    own = np.arange(form.blocks * form.block).reshape(form.blocks, form.block) < form.n
    return own if counts is None else own & (np.arange(form.block) < array(counts)[:, None])


def tree_sum(numbers: Any) -> Any:
    """Adds up each row in the order that the wire format fixes: the second half to the first, until one number is left."""
    while numbers.shape[1] > 1:
        half = numbers.shape[1] // 2
        numbers = numbers[:, :half] + numbers[:, half:]
    return numbers


def side_sums(rule: BlockQuantizer, values: Any, own: Any, unit: Any, count: Any) -> Sequence[Any]:
    """The sums of both sides of each block, and the number of elements in the upper one, after all splits."""
    steps = np.where(own, plain(rule.steps)(values, unit, rule.levels), 0)
    total = upper = steps.sum(1, np.int32, keepdims=True)
    many = own.sum(1, keepdims=True)
    for _ in range(rule.splits):
        sums = (each.astype(np.float32) for each in (total - upper, upper, many))
        beyond = own & (steps > plain(rule.threshold)(*sums, count))
        upper = np.where(beyond, steps, 0).sum(1, np.int32, keepdims=True)
        many = beyond.sum(1, keepdims=True)
    return [each.astype(np.float32) for each in (total - upper, upper, many)]


def scales_of(rule: BlockQuantizer, values: Any, own: Any) -> tuple[Any, Any]:
    """Both scales of each block, of which a rule may use one; a block without own elements is one of zeros."""
    bits = values.view(np.int32)
    if rule.extremes == "range":
        keys = plain(ordered)(bits)
        low, high = (np.where(own, keys, limit) for limit in (np.int32(0x7FFFFFFF), np.int32(-0x80000000)))
        low, high = (np.where(own[:, :1], key, 0) for key in (low.min(1, keepdims=True), high.max(1, keepdims=True)))
    else:
        high = np.where(own, bits & 0x7FFFFFFF, 0).max(1, keepdims=True)
        low = np.zeros_like(high)
    count = np.maximum(own.sum(1, keepdims=True), 1).astype(np.float32)
    sums: Sequence[Any] = (ZERO, ZERO, ZERO)
    if rule.sums:
        terms = plain(rule.terms)(values, plain(rule.unit)(low, high))
        sums = [tree_sum(np.where(own, term, ZERO)) if i < rule.sums else ZERO for i, term in enumerate(terms)]
    elif rule.splits:
        sums = side_sums(rule, values, own, plain(rule.unit)(low, high), count)
    first, second = plain(rule.scales)(low, high, *sums, count, rule.levels)
    return first, second


def dithers(form: BlockForm, seed: int | None) -> Any:
    """The random number of each element in [-0.5, 0.5)."""
    if seed is None:
        return NO_DITHER
    index = np.arange(form.blocks * form.block, dtype=np.uint64).reshape(form.blocks, form.block)
    keys = plain(random_key)(*map(np.uint32, seed_halves(seed)), (index[:, :1] >> 32).astype(np.uint32))
    return plain(dither)(plain(random_bits)(index.astype(np.uint32), *keys))


def shifts(form: BlockForm) -> Any:
    """The lowest bit in a byte of each of its codes, which are `stride` elements apart, as a column."""
    return np.arange(0, 8, form.bits, dtype=np.uint8)[:, None]


def write_payload(
    rule: BlockQuantizer,
    values: Any,
    own: Any,
    payload: torch.Tensor,
    form: BlockForm,
    seed: int | None,
    given: bool = False,
) -> None:
    """Encodes the own elements of a matrix of blocks; the codes of others are 0."""
    words, codes = map(array, form.parts(payload))
    scales = words[: form.blocks * form.words].reshape(form.blocks, form.words)
    if not given:
        first, second = scales_of(rule, values, own)
        scales[:, 1:] = second
        scales[:, :1] = first
    constants = plain(rule.encode_constants)(scales[:, :1], scales[:, -1:], rule.levels)
    found = plain(rule.encode)(values, *constants, dithers(form, seed), rule.levels) & ((1 << form.bits) - 1)
    fields = np.where(own, found, 0).astype(np.uint8).reshape(form.blocks, form.fields, form.stride)
    packed = np.bitwise_or.reduce(fields << shifts(form), axis=1)
    words[scales.size :] = 0
    codes[: form.used_code_bytes] = packed.reshape(-1)[: form.used_code_bytes]
    codes[form.used_code_bytes :] = 0


def decoded(rule: BlockQuantizer, form: BlockForm, words: Any, codes: Any) -> Any:
    """The float32 vector of a payload's scales and codes."""
    scales = words[: form.blocks * form.words].reshape(form.blocks, form.words)
    packed = np.zeros((form.blocks, 1, form.stride), np.uint8)
    packed.reshape(-1)[: codes.size] = codes[: packed.size]
    fields = (packed >> shifts(form)) & ((1 << form.bits) - 1)
    found = fields.reshape(form.blocks, form.block).astype(np.int32)
    if rule.signed:
        found = (found ^ (1 << (form.bits - 1))) - (1 << (form.bits - 1))
    constants = plain(rule.decode_constants)(scales[:, :1], scales[:, -1:], rule.levels)
    values = plain(rule.decode)(found, *constants, rule.levels)
    return np.broadcast_to(values, found.shape).reshape(-1)[: form.n]


def weighted_sum(terms: Iterable[Any], weights: Weights) -> Any:
    """The sum of float32 vectors in their order, each times its weight; 0 without terms."""
    total = ZERO
    for place, term in enumerate(terms):
        total = total + (term if weights.factors is None else term * array(weights.factors)[place])
    return total if weights.divisor == 1.0 else plain(quotient)(total, np.float32(weights.divisor))


def decoded_sum(
    rule: BlockQuantizer, payloads: torch.Tensor, form: BlockForm, scale: float, weights: Weights | None = None
) -> Any:
    """`scale` times the sum of decoded payloads."""
    parts = zip(*map(array, form.parts(payloads)), strict=True)
    total = weighted_sum((decoded(rule, form, *part) for part in parts), weights or Weights())
    return total * np.float32(scale)


@meant
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
    write_payload(rule, in_blocks(load(x), form), own_elements(form, counts), payload, form, seed, given)


@meant
def encode_pieces(
    rule: BlockQuantizer, pieces: Sequence[torch.Tensor], payload: torch.Tensor, form: BlockForm, seed: int | None
) -> None:
    """See `bagua_kernels.launchers.blockwise.encode_pieces`."""
    forms = [replace(form, n=piece.numel()) for piece in pieces]
    values = np.concatenate([in_blocks(load(piece), each) for piece, each in zip(pieces, forms, strict=True)])
    write_payload(rule, values, np.concatenate([own_elements(each) for each in forms]), payload, form, seed)


@meant
def decode(rule: BlockQuantizer, payload: torch.Tensor, out: torch.Tensor, form: BlockForm) -> None:
    """See `bagua_kernels.launchers.blockwise.decode`."""
    store(out, decoded(rule, form, *map(array, form.parts(payload))))


@meant
def decode_sum(
    rule: BlockQuantizer,
    payloads: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    form: BlockForm,
    weights: Weights,
) -> None:
    """See `bagua_kernels.launchers.blockwise.decode_sum`."""
    store(out, decoded_sum(rule, payloads, form, scale, weights))


@meant
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
    total = decoded_sum(rule, payloads, form, scale)
    write_payload(rule, in_blocks(total, form), own_elements(form, counts), out, form, seed)


# See `bagua_kernels.launchers.blockwise.encode_rows` and `decode_rows`.
encode_rows = functools.partial(encode_in_turn, encode)
encode_rows_of_pieces = functools.partial(encode_pieces_in_turn, encode_pieces)
decode_rows = functools.partial(decode_in_turn, decode)
