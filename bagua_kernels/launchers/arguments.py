"""Checks of arguments that launchers and codecs have in common."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ALIGNMENT = 16


def padded(size: int, multiple: int = ALIGNMENT) -> int:
    """`size` rounded up to a multiple of 16, or of another number."""
    return -(-size // multiple) * multiple


def checked_seed(seed: int | None) -> int | None:
    """`seed`, if it is None or fits in 64 unsigned bits."""
    if seed is not None and not 0 <= seed < 1 << 64:
        raise ValueError(
            f"the seed must be None or from 0 to 2**64 - 1, got {seed=}; see bagua_kernels.compression.fold_seed"
        )
    return seed


def seed_halves(seed: int | None) -> tuple[int, int]:
    """The low and the high 32 bits of a seed; zeros where there is none."""
    value = seed or 0
    return value & 0xFFFFFFFF, value >> 32


@dataclass(frozen=True)
class Weights:
    """What the terms of a sum are multiplied by, and the sum divided by.

    Attributes:
        factors: shape (terms,), float32; None stands for ones.
        divisor: of the sum.
    """

    factors: torch.Tensor | None = None
    divisor: float = 1.0


def checked_weights(weights: torch.Tensor | Sequence[float] | None, terms: int, device: torch.device) -> Weights:
    """The weights of a number of terms on a device, where None stands for ones.

    If `weights` are numbers and all are 1/n, for n terms, the plain sum is divided by n. That has no bias, where 1/3 in float32
    has one. A tensor is taken as it is.

    Raises:
        ValueError: a number, a dtype or a device does not fit.
    """
    if weights is None:
        return Weights()
    if not isinstance(weights, torch.Tensor):
        numbers = tuple(float(w) for w in weights)
        if len(numbers) == terms and all(w == 1.0 / terms for w in numbers):
            return Weights(divisor=float(terms))
        weights = _weights_on(numbers, device)
    fits = weights.dtype == torch.float32 and weights.shape == (terms,) and weights.is_contiguous()
    if not fits or weights.device != device:
        raise ValueError(
            f"weights must be contiguous float32 of shape {(terms,)} on {device}, one for each term, got {weights.dtype} of "
            f"shape {tuple(weights.shape)} on {weights.device}"
        )
    return Weights(weights)


@functools.lru_cache(maxsize=256)
def _weights_on(weights: tuple[float, ...], device: torch.device) -> torch.Tensor:
    # Kept, since a copy to a GPU costs more than a launch, and a topology has few rows.
    # waits: once for each row of weights, which is kept.
    return torch.tensor(weights, dtype=torch.float32, device=device)


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


def check_bytes(
    name: str, payload: torch.Tensor, shape: tuple[int, ...], device: torch.device, cause: str, strided: bool = False
) -> None:
    """As `check_payload`; `cause` is what the shape follows from, `strided` whether rows may have something behind them."""
    if not isinstance(payload, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(payload).__name__}")
    if payload.dtype != torch.uint8:
        raise TypeError(f"{name} must be of dtype uint8, got {payload.dtype}")
    fits = payload.dim() == len(shape) and all(w in (-1, g) for w, g in zip(shape, payload.shape, strict=True))
    if not fits:
        expected = tuple("ranks" if w == -1 else w for w in shape)
        raise ValueError(f"{name} must have shape {expected} for {cause}, got {tuple(payload.shape)}")
    if payload.device != device:
        raise ValueError(f"{name} must be on {device}, got {payload.device}")
    if strided and payload.dim() == 2 and payload.numel():
        # A message may hold more behind each payload.
        if payload.stride(1) != 1 or payload.stride(0) < payload.shape[1] or payload.stride(0) % ALIGNMENT:
            raise ValueError(
                f"{name} must have contiguous rows that begin at multiples of {ALIGNMENT} bytes, got stride {payload.stride()}"
            )
    elif not payload.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {payload.stride()}; call .contiguous()")
    if payload.data_ptr() % ALIGNMENT:
        raise ValueError(f"{name} must start at a multiple of {ALIGNMENT} bytes; clone it or slice at such a multiple")
