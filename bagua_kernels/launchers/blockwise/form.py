"""Where the parts of a payload of blocks lie, and the checks of tensors against it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bagua_kernels.launchers.arguments import check_bytes, padded
from bagua_kernels.rules.quantizers import BlockQuantizer


@dataclass(frozen=True)
class BlockForm:
    """Where the parts of a payload lie.

    Attributes:
        n: number of elements.
        block: elements a block.
        words: 32-bit scales per block.
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


def form_of(rule: BlockQuantizer, n: int, block: int) -> BlockForm:
    """The form of the payload of `n` elements.

    Raises:
        ValueError: the block size does not fit.
    """
    return BlockForm(n, checked_block(block), rule.words, rule.bits)


def checked_block(block: int) -> int:
    """`block`, if it is a power of two from 32 to 4096."""
    if not isinstance(block, int) or not 32 <= block <= 4096 or block & (block - 1):
        raise ValueError(f"the block size must be a power of two from 32 to 4096, got {block=}")
    return block


def check_counts(counts: torch.Tensor | None, form: BlockForm, device: torch.device) -> None:
    """Raises unless `counts` is None or has an int32 for each block, on the device.

    Kernels clamp what is negative or beyond a block's end, so that no number makes them read or write outside.
    """
    if counts is None:
        return
    fits = counts.dtype == torch.int32 and counts.shape == (form.blocks,) and counts.is_contiguous()
    if not fits or counts.device != device:
        raise ValueError(
            f"counts must be contiguous int32 of shape {(form.blocks,)} on {device} for n={form.n} and "
            f"block={form.block}, got {counts.dtype} of shape {tuple(counts.shape)} on {counts.device}"
        )


def check_payload(
    name: str, payload: torch.Tensor, form: BlockForm, shape: tuple[int, ...], device: torch.device
) -> None:
    """Raises unless `payload` is an aligned uint8 tensor of the shape (-1 stands for any size) on the device.

    It must be contiguous, or have contiguous rows.
    """
    check_bytes(name, payload, shape, device, f"n={form.n} and block={form.block}", strided=True)
