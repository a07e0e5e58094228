"""Runs a block quantizer: reduce each block to its statistics, then encode; decode; decode many, sum and encode again.

A payload holds the scales of all blocks and then the codes; `docs/wire-format.md` fixes it. Three more kernels fuse what
training does around that: error feedback, encoding many tensors without a flat copy, and an optimizer step on what was
decoded. Arguments are checked here, once for all backends; each backend offers the same functions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from bagua_kernels.jit.op import Op
from bagua_kernels.launchers.arguments import FLOAT_DTYPES, check_bytes, check_vector, checked_seed, padded
from bagua_kernels.rules import feedback as feedback_rules
from bagua_kernels.rules import random, rounding
from bagua_kernels.rules.optimizers import ElementwiseRule
from bagua_kernels.rules.quantizers import BlockQuantizer

OP = Op(__name__)


@dataclass(frozen=True)
class Layout:
    """Where the parts of a payload lie.

    Attributes:
        n: number of elements.
        block: elements a block.
        words: 32-bit scales a block.
        bits: bits a code: 8, 4, 2 or 1.
    """

    n: int
    block: int
    words: int
    bits: int

    @property
    def blocks(self) -> int:
        """Number of blocks; the last may be short."""
        return -(-self.n // self.block)

    @property
    def stride(self) -> int:
        """Bytes of a block's codes."""
        return self.block * self.bits // 8

    @property
    def fields(self) -> int:
        """Codes in a byte; those of one byte are `stride` elements apart."""
        return 8 // self.bits

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales, padded to 16."""
        return padded(4 * self.words * self.blocks)

    @property
    def used_code_bytes(self) -> int:
        """Bytes of the codes without the pad. Codes of less than a byte always fill their block."""
        return self.n if self.bits == 8 else self.blocks * self.stride

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes, padded to 16."""
        return padded(self.used_code_bytes)

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return self.scale_bytes + self.code_bytes

    def parts(self, payloads: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Splits payloads of shape (…, size) into int32 scales and uint8 codes, from a block on; views, pads included."""
        scales = payloads[..., 4 * self.words * first : self.scale_bytes].view(torch.int32)
        return scales, payloads[..., self.scale_bytes + first * self.stride :]


def layout_of(rule: BlockQuantizer, n: int, block: int) -> Layout:
    """The layout of `n` elements.

    Raises:
        ValueError: the block size does not fit.
    """
    return Layout(n, checked_block(block), rule.words, rule.bits)


def encode(
    rule: BlockQuantizer,
    x: torch.Tensor,
    payload: torch.Tensor,
    *,
    block: int,
    seed: int | None,
    given: bool = False,
    counts: torch.Tensor | None = None,
) -> None:
    """Encodes a vector into a payload.

    Args:
        rule: the quantizer.
        x: shape (n,), float32, float16 or bfloat16, contiguous.
        payload: shape (size,), uint8, on the same device; overwritten.
        block: elements a block, a power of two from 32 to 4096.
        seed: 64-bit seed of stochastic rounding; None rounds to nearest.
        given: whether the payload's scales are there already and are to be used.
        counts: shape (blocks,), int32, on the same device: how many elements at the beginning of each block are its own. The
            others only fill the block up: they are not read, and their codes are 0. None stands for all of them.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a shape, size, device, alignment, block or seed does not fit.
    """
    check_vector("x", x, FLOAT_DTYPES)
    layout = layout_of(rule, x.numel(), block)
    check_payload("payload", payload, layout, (layout.size,), x.device)
    seed = checked_seed(seed)
    check_counts(counts, layout, x.device)
    if layout.n:
        OP.backend(x.device).encode(rule, x, payload, layout, seed, given, counts)


def encode_pieces(
    rule: BlockQuantizer, pieces: Sequence[torch.Tensor], payload: torch.Tensor, *, block: int, seed: int | None
) -> None:
    """Encodes many tensors as one vector, each filled up to a multiple of the block, without a flat copy of them.

    What fills a tensor's last block up is not its own: see `counts` of `encode`.

    Args:
        rule: the quantizer.
        pieces: contiguous tensors of any shape, of one dtype, on the payload's device.
        payload: shape (size,), uint8, of the vector of all blocks of all pieces; overwritten.
        block: elements a block.
        seed: 64-bit seed of stochastic rounding; None rounds to nearest.

    Raises:
        TypeError: a dtype is not supported, or they differ.
        ValueError: a shape, size, device, alignment, block or seed does not fit.
    """
    for i, piece in enumerate(pieces):
        if not piece.is_contiguous():
            raise ValueError(f"piece {i} must be contiguous, got stride {piece.stride()}; call .contiguous()")
    flat = [piece.detach().view(-1) for piece in pieces]
    for i, piece in enumerate(flat):
        check_vector(f"piece {i}", piece, FLOAT_DTYPES)
        if piece.dtype != flat[0].dtype or piece.device != payload.device:
            raise TypeError(
                f"piece {i} must be {flat[0].dtype} on {payload.device} as the others, got {piece.dtype} on {piece.device}"
            )
    layout = layout_of(rule, sum(padded(piece.numel(), block) for piece in flat), block)
    check_payload("payload", payload, layout, (layout.size,), payload.device)
    seed = checked_seed(seed)
    if layout.n:
        OP.backend(payload.device).encode_pieces(rule, flat, payload, layout, seed)


def feedback(
    rule: BlockQuantizer,
    x: torch.Tensor,
    residual: torch.Tensor,
    payload: torch.Tensor,
    *,
    block: int,
    factor: float,
    seed: int | None,
    counts: torch.Tensor | None = None,
) -> None:
    """Encodes `factor * (x + residual)` and leaves in `residual` what the payload lacks of `x + residual`, in one pass.

    Where the sum or the decoded value is not finite the residual stays as it was.

    Args:
        rule: the quantizer.
        x: shape (n,), float32, float16 or bfloat16, contiguous.
        residual: shape (n,), float32, contiguous; updated.
        payload: shape (size,), uint8; overwritten.
        block: elements a block.
        factor: a float32; 1 for a contractive codec, 1 / (1 + omega) for an unbiased one.
        seed: 64-bit seed of stochastic rounding; None rounds to nearest.
        counts: as for `encode`; residuals of other elements stay as they are.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a shape, size, device, alignment, block or seed does not fit.
    """
    check_vector("x", x, FLOAT_DTYPES)
    check_vector("residual", residual, (torch.float32,))
    if residual.shape != x.shape or residual.device != x.device:
        raise ValueError(
            f"residual must have shape {tuple(x.shape)} on {x.device} as x, got {tuple(residual.shape)} on {residual.device}"
        )
    layout = layout_of(rule, x.numel(), block)
    check_payload("payload", payload, layout, (layout.size,), x.device)
    seed = checked_seed(seed)
    check_counts(counts, layout, x.device)
    if layout.n:
        OP.backend(x.device).feedback(rule, x, residual, payload, layout, factor, seed, counts)


def decode_apply(
    rule: BlockQuantizer,
    payloads: torch.Tensor,
    update: ElementwiseRule,
    arrays: Sequence[torch.Tensor],
    scalars: Sequence[float],
    *,
    scale: float,
    block: int,
    position: int = 1,
    first: int = 0,
    total: int | None = None,
) -> None:
    """Decodes payloads and applies an optimizer's rule to what they sum up to, without writing the gradient.

    Args:
        rule: the quantizer.
        payloads: shape (ranks, size), uint8.
        update: a rule of which one array is the gradient.
        arrays: the rule's other arrays in their order, each of shape (n,), float32, float16 or bfloat16, contiguous; updated.
        scalars: the rule's scalars.
        scale: factor of the sum of the payloads.
        block: elements a block.
        position: the gradient's place among the rule's arrays.
        first: the block of the payloads with which the arrays begin.
        total: elements that the payloads are of; n by default.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a number of arrays, a shape, size, device, alignment or block does not fit, the rule writes the gradient, or
            the arrays go beyond the payloads' end.
    """
    if len(arrays) != update.arrays - 1 or not arrays:
        raise ValueError(
            f"rule {update.name!r} takes {update.arrays - 1} arrays beside the gradient, got {len(arrays)}"
        )
    wanted = _parameters(update.function) - update.arrays
    if len(scalars) != wanted:
        raise ValueError(f"rule {update.name!r} takes {wanted} scalars, got {len(scalars)}")
    if not 0 <= position < update.arrays or position in update.writes:
        raise ValueError(f"array {position} of rule {update.name!r} is no gradient: it must be one that is only read")
    for i, array in enumerate(arrays):
        check_vector(f"array {i}", array, FLOAT_DTYPES)
        if array.shape != arrays[0].shape or array.device != payloads.device:
            raise ValueError(
                f"array {i} must have shape {tuple(arrays[0].shape)} on {payloads.device}, "
                f"got {tuple(array.shape)} on {array.device}"
            )
    layout = layout_of(rule, arrays[0].numel(), block)
    whole = layout if total is None else layout_of(rule, total, block)
    if first < 0 or first * block + layout.n > whole.n:
        raise ValueError(f"payloads of {whole.n} elements do not hold {layout.n} from block {first} of {block} on")
    check_payload("payloads", payloads, whole, (-1, whole.size), payloads.device)
    if layout.n:
        numbers = tuple(float(s) for s in scalars)
        backend = OP.backend(payloads.device)
        backend.decode_apply(rule, payloads, update, tuple(arrays), numbers, scale, layout, position, whole, first)


@functools.lru_cache(maxsize=256)
def _parameters(function: Callable[..., Any]) -> int:
    return len(inspect.signature(function).parameters)


def decode(rule: BlockQuantizer, payload: torch.Tensor, out: torch.Tensor, *, block: int) -> None:
    """Decodes a payload of shape (size,) into `out`, of shape (n,); arguments and errors as in `encode`."""
    check_vector("out", out, FLOAT_DTYPES)
    layout = layout_of(rule, out.numel(), block)
    check_payload("payload", payload, layout, (layout.size,), out.device)
    if layout.n:
        OP.backend(out.device).decode(rule, payload, out, layout)


def decode_sum(rule: BlockQuantizer, payloads: torch.Tensor, out: torch.Tensor, *, scale: float, block: int) -> None:
    """Writes `scale` times the sum of all decoded payloads, of shape (ranks, size), to `out`, of shape (n,).

    Each payload is read once. The sum is taken in float32, in the order of the ranks. Errors as in `encode`.
    """
    check_vector("out", out, FLOAT_DTYPES)
    layout = layout_of(rule, out.numel(), block)
    check_payload("payloads", payloads, layout, (-1, layout.size), out.device)
    if layout.n:
        OP.backend(out.device).decode_sum(rule, payloads, out, scale, layout)


def reduce(
    rule: BlockQuantizer,
    payloads: torch.Tensor,
    out: torch.Tensor,
    *,
    n: int,
    scale: float,
    block: int,
    seed: int | None,
    counts: torch.Tensor | None = None,
) -> None:
    """Encodes `scale` times the sum of all decoded payloads.

    Each payload is read once and nothing of float32 size is written.

    Args:
        rule: the quantizer.
        payloads: shape (ranks, size), uint8.
        out: shape (size,), uint8; overwritten. Must not overlap `payloads`.
        n: number of elements in a payload.
        scale: factor of the sum, a float32; 1 / ranks for a mean.
        block: elements a block.
        seed: 64-bit seed of stochastic rounding; None rounds to nearest.
        counts: as for `encode`.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a shape, size, device, alignment, block or seed does not fit.
    """
    if n < 0:
        raise ValueError(f"the number of elements must be 0 or more, got {n=}")
    layout = layout_of(rule, n, block)
    check_payload("payloads", payloads, layout, (-1, layout.size), payloads.device)
    check_payload("out", out, layout, (layout.size,), payloads.device)
    seed = checked_seed(seed)
    check_counts(counts, layout, out.device)
    if layout.n:
        OP.backend(out.device).reduce(rule, payloads, out, scale, layout, seed, counts)


def rule_bindings(rule: BlockQuantizer) -> dict[str, Callable[..., Any]]:
    """The names by which the templates of every backend call rules."""
    return {
        "ordered": rounding.ordered,
        "float_bits": rounding.float_bits,
        "compensated": feedback_rules.compensated,
        "remainder": feedback_rules.remainder,
        "unit": rule.unit,
        "terms": rule.terms,
        "random_key": random.random_key,
        "random_bits": random.random_bits,
        "dither": random.dither,
        "scales": rule.scales,
        "encode_constants": rule.encode_constants,
        "encode": rule.encode,
        "decode_constants": rule.decode_constants,
        "decode": rule.decode,
    }


def rule_constants(rule: BlockQuantizer) -> dict[str, int]:
    """The numbers that the templates of every backend know a rule by."""
    return {
        "WORDS": rule.words,
        "BITS": rule.bits,
        "FIELDS": 8 // rule.bits,
        "MASK": (1 << rule.bits) - 1,
        "HALF": 1 << (rule.bits - 1),
        "LEVELS": rule.levels,
        "SIGNED": int(rule.signed),
        "RANGE": int(rule.extremes == "range"),
        "SUMS": rule.sums,
    }


def piece_table(pieces: Sequence[torch.Tensor], block: int) -> tuple[Any, Any, Any]:
    """Where the pieces' memory is and how long it is, and each one's first block, with the number of all blocks at the end.

    Three arrays of int64.
    """
    sizes = [piece.numel() for piece in pieces]
    firsts = [0, *accumulate(-(-size // block) for size in sizes)]
    addresses = [piece.data_ptr() for piece in pieces]
    return np.array(addresses, np.int64), np.array(sizes, np.int64), np.array(firsts, np.int64)


def seed_halves(seed: int | None) -> tuple[int, int]:
    """The low and the high 32 bits of a seed; zeros where there is none."""
    value = seed or 0
    return value & 0xFFFFFFFF, value >> 32


def checked_block(block: int) -> int:
    """`block`, if it is a power of two from 32 to 4096."""
    if not isinstance(block, int) or not 32 <= block <= 4096 or block & (block - 1):
        raise ValueError(f"the block size must be a power of two from 32 to 4096, got {block=}")
    return block


def check_counts(counts: torch.Tensor | None, layout: Layout, device: torch.device) -> None:
    """Raises unless `counts` is None or has an int32 for each block, on the device.

    Kernels clamp what is negative or beyond a block's end, so that no number makes them read or write outside.
    """
    if counts is None:
        return
    fits = counts.dtype == torch.int32 and counts.shape == (layout.blocks,) and counts.is_contiguous()
    if not fits or counts.device != device:
        raise ValueError(
            f"counts must be contiguous int32 of shape {(layout.blocks,)} on {device} for n={layout.n} and "
            f"block={layout.block}, got {counts.dtype} of shape {tuple(counts.shape)} on {counts.device}"
        )


def check_payload(
    name: str, payload: torch.Tensor, layout: Layout, shape: tuple[int, ...], device: torch.device
) -> None:
    """Raises unless `payload` is an aligned uint8 tensor of the shape (-1 stands for any size) on the device.

    It must be contiguous, or have contiguous rows.
    """
    check_bytes(name, payload, shape, device, f"n={layout.n} and block={layout.block}", strided=True)
