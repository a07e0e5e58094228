"""Runs a block quantizer: reduce each block to its range, then encode; decode; decode many, sum and encode again.

A payload holds the scales of all blocks and then one code a byte; `docs/wire-format.md` fixes it. Arguments are checked here,
once for all backends; each backend offers the same four functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bagua_kernels.jit.op import Op
from bagua_kernels.rules import random, rounding
from bagua_kernels.rules.quantizers import BlockQuantizer

OP = Op(__name__)
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ALIGNMENT = 16


@dataclass(frozen=True)
class Layout:
    """Where the parts of a payload lie.

    Attributes:
        n: number of elements.
        block: elements a block.
        words: 32-bit scales a block.
    """

    n: int
    block: int
    words: int

    @property
    def blocks(self) -> int:
        """Number of blocks; the last may be short."""
        return -(-self.n // self.block)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales, padded to 16."""
        return padded(4 * self.words * self.blocks)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes, padded to 16."""
        return padded(self.n)

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return self.scale_bytes + self.code_bytes

    def parts(self, payloads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Splits payloads of shape (…, size) into int32 scales and uint8 codes; both are views, pads included."""
        return payloads[..., : self.scale_bytes].view(torch.int32), payloads[..., self.scale_bytes :]


def padded(size: int) -> int:
    """`size` rounded up to a multiple of 16."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def encode(rule: BlockQuantizer, x: torch.Tensor, payload: torch.Tensor, *, block: int, seed: int | None) -> None:
    """Encodes a vector into a payload.

    Args:
        rule: the quantizer.
        x: shape (n,), float32, float16 or bfloat16, contiguous.
        payload: shape (size,), uint8, on the same device; overwritten.
        block: elements a block, a power of two from 32 to 4096.
        seed: 64-bit seed of stochastic rounding; None rounds to nearest.

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a shape, size, device, alignment, block or seed does not fit.
    """
    check_vector("x", x, FLOAT_DTYPES)
    layout = Layout(x.numel(), checked_block(block), rule.words)
    check_payload("payload", payload, layout, (layout.size,), x.device)
    seed = checked_seed(seed)
    if layout.n:
        OP.backend(x.device).encode(rule, x, payload, layout, seed)


def decode(rule: BlockQuantizer, payload: torch.Tensor, out: torch.Tensor, *, block: int) -> None:
    """Decodes a payload of shape (size,) into `out`, of shape (n,); arguments and errors as in `encode`."""
    check_vector("out", out, FLOAT_DTYPES)
    layout = Layout(out.numel(), checked_block(block), rule.words)
    check_payload("payload", payload, layout, (layout.size,), out.device)
    if layout.n:
        OP.backend(out.device).decode(rule, payload, out, layout)


def decode_sum(rule: BlockQuantizer, payloads: torch.Tensor, out: torch.Tensor, *, scale: float, block: int) -> None:
    """Writes `scale` times the sum of all decoded payloads, of shape (ranks, size), to `out`, of shape (n,).

    Each payload is read once. The sum is taken in float32, in the order of the ranks. Errors as in `encode`.
    """
    check_vector("out", out, FLOAT_DTYPES)
    layout = Layout(out.numel(), checked_block(block), rule.words)
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

    Raises:
        TypeError: a dtype is not supported.
        ValueError: a shape, size, device, alignment, block or seed does not fit.
    """
    if n < 0:
        raise ValueError(f"the number of elements must be 0 or more, got {n=}")
    layout = Layout(n, checked_block(block), rule.words)
    check_payload("payloads", payloads, layout, (-1, layout.size), payloads.device)
    check_payload("out", out, layout, (layout.size,), payloads.device)
    seed = checked_seed(seed)
    if layout.n:
        OP.backend(out.device).reduce(rule, payloads, out, scale, layout, seed)


def rule_bindings(rule: BlockQuantizer) -> dict[str, Callable[..., Any]]:
    """The names by which the templates of every backend call rules."""
    return {
        "ordered": rounding.ordered,
        "float_bits": rounding.float_bits,
        "random_key": random.random_key,
        "random_bits": random.random_bits,
        "dither": random.dither,
        "scales": rule.scales,
        "encode_constants": rule.encode_constants,
        "encode": rule.encode,
        "decode_constants": rule.decode_constants,
        "decode": rule.decode,
    }


def seed_halves(seed: int | None) -> tuple[int, int]:
    """The low and the high 32 bits of a seed; zeros where there is none."""
    value = seed or 0
    return value & 0xFFFFFFFF, value >> 32


def checked_block(block: int) -> int:
    """`block`, if it is a power of two from 32 to 4096."""
    if not 32 <= block <= 4096 or block & (block - 1):
        raise ValueError(f"the block size must be a power of two from 32 to 4096, got {block=}")
    return block


def checked_seed(seed: int | None) -> int | None:
    """`seed`, if it is None or fits in 64 unsigned bits."""
    if seed is not None and not 0 <= seed < 1 << 64:
        raise ValueError(
            f"the seed must be None or from 0 to 2**64 - 1, got {seed=}; see bagua_kernels.compression.fold_seed"
        )
    return seed


def check_vector(name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raises unless `x` is a contiguous 1-D tensor of one of the dtypes."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dtype not in dtypes:
        supported = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} must be of dtype {supported}, got {x.dtype}; convert it with .to()")
    if x.dim() != 1:
        raise ValueError(f"{name} must be 1-D, got shape {tuple(x.shape)}; flatten it with .view(-1)")
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {x.stride()}; call .contiguous()")


def check_payload(
    name: str, payload: torch.Tensor, layout: Layout, shape: tuple[int, ...], device: torch.device
) -> None:
    """Raises unless `payload` is a contiguous, aligned uint8 tensor of the shape (-1 stands for any size) on the device."""
    if not isinstance(payload, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(payload).__name__}")
    if payload.dtype != torch.uint8:
        raise TypeError(f"{name} must be of dtype uint8, got {payload.dtype}")
    fits = payload.dim() == len(shape) and all(w in (-1, g) for w, g in zip(shape, payload.shape, strict=True))
    if not fits:
        expected = tuple("ranks" if w == -1 else w for w in shape)
        raise ValueError(
            f"{name} must have shape {expected} for n={layout.n} and block={layout.block}, got {tuple(payload.shape)}"
        )
    if payload.device != device:
        raise ValueError(f"{name} must be on {device}, got {payload.device}")
    if not payload.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {payload.stride()}; call .contiguous()")
    if payload.data_ptr() % ALIGNMENT:
        raise ValueError(f"{name} must start at a multiple of {ALIGNMENT} bytes; clone it or slice at such a multiple")
