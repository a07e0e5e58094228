"""Runs a block quantizer: reduce each block to its statistics, then encode; decode; decode many, sum and encode again.

A payload holds the scales of all blocks and then the codes; `docs/wire-format.md` fixes it. One more kernel encodes many tensors
without a flat copy. `fusion` adds rules over several arrays before encoding and after decoding; error feedback is one of them.
Arguments are checked here, once for all backends; each backend offers the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua_kernels.jit.op import Op
from bagua_kernels.launchers.arguments import FLOAT_DTYPES, check_vector, checked_seed, checked_weights, padded
from bagua_kernels.launchers.blockwise.form import check_counts, check_payload, form_of
from bagua_kernels.launchers.blockwise.fusion import decode_add as decode_add
from bagua_kernels.launchers.blockwise.fusion import decode_apply as decode_apply
from bagua_kernels.launchers.blockwise.fusion import encode_rule as encode_rule
from bagua_kernels.launchers.blockwise.rows import Rows as Rows
from bagua_kernels.launchers.blockwise.rows import decode_rows as decode_rows
from bagua_kernels.launchers.blockwise.rows import encode_rows as encode_rows
from bagua_kernels.launchers.blockwise.rows import encode_rows_of_pieces as encode_rows_of_pieces
from bagua_kernels.rules.messages import FEEDBACK
from bagua_kernels.rules.quantizers import BlockQuantizer

OP = Op(__name__)


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
        given: True if the payload already contains scales that are to be used.
        counts: shape (blocks,), int32, on the same device: how many elements at the beginning of each block are its own. The
            others only fill the block up: they are not read, and their codes are 0. None stands for all of them.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a shape, size, device, alignment, block or seed does not fit.
    """
    check_vector("x", x, FLOAT_DTYPES)
    form = form_of(rule, x.numel(), block)
    check_payload("payload", payload, form, (form.size,), x.device)
    seed = checked_seed(seed)
    check_counts(counts, form, x.device)
    if form.n:
        OP.backend(x.device).encode(rule, x, payload, form, seed, given, counts)


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
    form = form_of(rule, sum(padded(piece.numel(), block) for piece in flat), block)
    check_payload("payload", payload, form, (form.size,), payload.device)
    seed = checked_seed(seed)
    if form.n:
        OP.backend(payload.device).encode_pieces(rule, flat, payload, form, seed)


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
    encode_rule(rule, FEEDBACK, (x, residual), (factor,), payload, block=block, seed=seed, counts=counts)


def decode(rule: BlockQuantizer, payload: torch.Tensor, out: torch.Tensor, *, block: int) -> None:
    """Decodes a payload of shape (size,) into `out`, of shape (n,); arguments and errors as in `encode`."""
    check_vector("out", out, FLOAT_DTYPES)
    form = form_of(rule, out.numel(), block)
    check_payload("payload", payload, form, (form.size,), out.device)
    if form.n:
        OP.backend(out.device).decode(rule, payload, out, form)


def decode_sum(
    rule: BlockQuantizer,
    payloads: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    block: int,
    weights: torch.Tensor | Sequence[float] | None = None,
) -> None:
    """Writes `scale` times the sum of all decoded payloads, each times its weight, to `out`.

    Each payload is read once. The sum is taken in float32, from the first payload to the last. Each product is rounded to float32
    before it is added. If all weights are 1/n, for n payloads, the sum of the payloads is divided by n instead.

    Args:
        rule: the quantizer.
        payloads: shape (ranks, size), uint8.
        out: shape (n,); overwritten.
        scale: factor of the sum.
        block: elements a block.
        weights: shape (ranks,), float32 on the device of the payloads, or numbers. None stands for ones.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a shape, size, device, alignment or block does not fit.
    """
    check_vector("out", out, FLOAT_DTYPES)
    form = form_of(rule, out.numel(), block)
    check_payload("payloads", payloads, form, (-1, form.size), out.device)
    checked = checked_weights(weights, len(payloads), payloads.device)
    if form.n:
        OP.backend(out.device).decode_sum(rule, payloads, out, scale, form, checked)


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
    form = form_of(rule, n, block)
    check_payload("payloads", payloads, form, (-1, form.size), payloads.device)
    check_payload("out", out, form, (form.size,), payloads.device)
    seed = checked_seed(seed)
    check_counts(counts, form, out.device)
    if form.n:
        OP.backend(out.device).reduce(rule, payloads, out, scale, form, seed, counts)
