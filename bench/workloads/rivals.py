"""Block codecs without this package: as one writes them with PyTorch operations, and PyTorch's own where it has some.

Library routes exist for three codecs. `quantize_per_channel`, over a view of shape (blocks, block), does `AbsMaxInt8`. The
row-wise prepacking of embedding tables does `MinMaxUInt8` and `MinMaxUInt4`, for 4 bits with scales in float16. Prepacking
works on CPUs only; `quantize_per_channel` is used on CPUs only too, because it was not tried on a GPU. PyTorch has no route
for the others: its 4-bit tensors are unsigned. Nothing in it packs signs, rounds at random, scales float8 by blocks, or
adds quantized gradients.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bagua_kernels.compression import (
    FP8,
    QSGD,
    AbsMaxInt4,
    AbsMaxInt8,
    BlockCodec,
    MinMaxUInt4,
    MinMaxUInt8,
    Natural,
    Sign,
    TernGrad,
)

Parts = tuple[torch.Tensor, ...]
EAGER = "torch"
FLOAT8 = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


@dataclass(frozen=True)
class Rival:
    """One way to do a codec's work. The vector's length must be a multiple of the block.

    Attributes:
        name: the row's name.
        encode: a vector to the tensors that would be sent.
        decode: these to the vector.
    """

    name: str
    encode: Callable[[torch.Tensor], Parts]
    decode: Callable[..., torch.Tensor]

    def stored(self, parts: Parts) -> int:
        """The number of bytes that would be sent."""
        return sum(part.numel() * part.element_size() for part in parts)


def full_blocks(n: int, block: int) -> int:
    """The PyTorch rows leave the last, short block out: padding would cost them another copy of everything."""
    return n // block * block


def rounded(steps: torch.Tensor, stochastic: bool) -> torch.Tensor:
    """Rounds in place."""
    if stochastic:
        steps += torch.rand_like(steps).sub_(0.5)
    return steps.round_()


def greatest_magnitude(blocks: torch.Tensor) -> torch.Tensor:
    """Of each row, as a column: without `abs`, which would write all of it."""
    return torch.maximum(blocks.amin(1, keepdim=True).neg_(), blocks.amax(1, keepdim=True))


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Several codes of shape (n,), uint8, to a byte. Codes that share one lie far apart, so that every operand is contiguous."""
    planes = codes.view(8 // bits, -1)
    packed = planes[0].clone() if len(planes) > 1 else planes[0]
    for i in range(1, len(planes)):
        packed |= planes[i] << (bits * i)
    return packed


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack`."""
    if bits == 8:
        return packed
    planes = torch.empty(8 // bits, packed.numel(), dtype=torch.uint8, device=packed.device)
    for i, plane in enumerate(planes):
        torch.bitwise_right_shift(packed, bits * i, out=plane)
    return planes.bitwise_and_((1 << bits) - 1).view(-1)


def minmax(block: int, bits: int, stochastic: bool) -> Rival:
    levels = (1 << bits) - 1

    def encode(x: torch.Tensor) -> Parts:
        blocks = x.view(-1, block)
        low = blocks.amin(1, keepdim=True)
        step = (blocks.amax(1, keepdim=True) - low).div_(levels)
        steps = (blocks - low).div_(step)
        codes = rounded(steps, stochastic).clamp_(0, levels).to(torch.uint8)
        return low, step, pack(codes.view(-1), bits)

    def decode(low: torch.Tensor, step: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        return unpack(packed, bits).view(-1, block).to(torch.float32).mul_(step).add_(low).view(-1)

    return Rival(EAGER, encode, decode)


def absmax(block: int, bits: int, levels: int, stochastic: bool) -> Rival:
    # Codes that share a byte must not be negative.
    dtype, offset = (torch.int8, 0) if bits == 8 else (torch.uint8, levels)

    def encode(x: torch.Tensor) -> Parts:
        blocks = x.view(-1, block)
        step = greatest_magnitude(blocks).div_(levels)
        codes = rounded(blocks / step, stochastic)
        return step, pack((codes.add_(offset) if offset else codes).to(dtype).view(-1), bits)

    def decode(step: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        values = unpack(packed, bits).view(-1, block).to(torch.float32)
        return (values.sub_(offset) if offset else values).mul_(step).view(-1)

    return Rival(EAGER, encode, decode)


def sign(block: int) -> Rival:
    def encode(x: torch.Tensor) -> Parts:
        blocks = x.view(-1, block)
        return blocks.abs().mean(1, keepdim=True), pack((x >= 0).view(torch.uint8), 1)

    def decode(mean: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        return unpack(packed, 1).view(-1, block).to(torch.float32).mul_(2).sub_(1).mul_(mean).view(-1)

    return Rival(EAGER, encode, decode)


def natural(block: int) -> Rival:
    def encode(x: torch.Tensor) -> Parts:
        blocks = x.view(-1, block)
        mantissa, exponent = torch.frexp(blocks)
        # Magnitudes are from 1/2 to 1 times 2^exponent, and become one of the two.
        exponent += (torch.rand_like(mantissa) < mantissa.abs_().mul_(2).sub_(1)).to(torch.int32).sub_(1)
        top = exponent.amax(1, keepdim=True)
        codes = (top - exponent).clamp_(max=127).to(torch.uint8)
        codes |= torch.signbit(blocks).to(torch.uint8) << 7
        return top.to(torch.int8), codes.view(-1)

    def decode(top: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        blocks = codes.view(-1, block)
        power = torch.exp2(top - (blocks & 127).to(torch.float32))
        return torch.where(blocks >= 128, -power, power).view(-1)

    return Rival(EAGER, encode, decode)


def fp8(block: int, format: str) -> Rival:
    dtype, greatest = FLOAT8[format]

    def encode(x: torch.Tensor) -> Parts:
        blocks = x.view(-1, block)
        scale = greatest_magnitude(blocks).div_(greatest)
        return scale, (blocks / scale).to(dtype)

    def decode(scale: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        return codes.to(torch.float32).mul_(scale).view(-1)

    return Rival(EAGER, encode, decode)


@functools.cache
def quiet_quantized_tensors() -> None:
    """Makes one quantized tensor unheard: PyTorch warns once a process that they are deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.quantize_per_channel(torch.ones(1, 1), torch.ones(1), torch.zeros(1, dtype=torch.int64), 0, torch.qint8)


def per_channel(block: int) -> Rival:
    """Symmetric, with each block as a channel; scales as the symmetric observers of `torch.ao` find them."""
    quiet_quantized_tensors()

    def encode(x: torch.Tensor) -> Parts:
        blocks = x.view(-1, block)
        scales = greatest_magnitude(blocks).div_(127).view(-1)
        # Integer zero points: those of another type choose a kernel that quantizes with them in floating point.
        zeros = torch.zeros_like(scales, dtype=torch.int64)
        return torch.quantize_per_channel(blocks, scales, zeros, 0, torch.qint8), scales

    def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        # The codes have scales of their own; the others are here because both are sent.
        return codes.dequantize().view(-1)

    return Rival("torch quantize_per_channel", encode, decode)


def embedding(block: int, kind: str) -> Rival:
    """Row-wise min-max quantization, with each block as a row; a row's scale and minimum follow its codes."""
    pack_rows = getattr(torch.ops.quantized, f"embedding_bag_{kind}_prepack")
    unpack_rows = getattr(torch.ops.quantized, f"embedding_bag_{kind}_unpack")
    return Rival(
        f"torch embedding_bag_{kind}",
        lambda x: (pack_rows(x.view(-1, block)),),
        lambda packed: unpack_rows(packed).view(-1),
    )


def rivals(codec: BlockCodec, device: torch.device) -> list[Rival]:
    """All ways of PyTorch's to do what a codec does on a device."""
    block, stochastic, bits = codec.block, codec.stochastic, codec.rule.bits
    library = device.type == "cpu" and not stochastic
    match codec:
        case MinMaxUInt8() | MinMaxUInt4():
            eager = minmax(block, bits, stochastic)
            return [eager, embedding(block, "byte" if bits == 8 else "4bit")] if library else [eager]
        case AbsMaxInt8():
            eager = absmax(block, bits, codec.rule.levels, stochastic)
            return [eager, per_channel(block)] if library else [eager]
        case AbsMaxInt4() | QSGD(norm="max"):
            return [absmax(block, bits, codec.rule.levels, stochastic)]
        case TernGrad():
            return [absmax(block, bits, 1, stochastic=True)]
        case Sign(two_means=False):
            return [sign(block)]
        case Natural():
            return [natural(block)]
        case FP8(stochastic=False):
            return [fp8(block, codec.format)]
        case _:
            raise ValueError(f"nothing here does what {codec} does")
