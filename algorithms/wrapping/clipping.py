"""Notices that gradients are being clipped by functions that know nothing of algorithms."""

from __future__ import annotations

from types import FrameType

import torch.nn.utils.clip_grad


def is_clipping(caller: FrameType) -> bool:
    """Returns True if a frame is that of a function of `torch.nn.utils` that clips gradients.

    It gets no more than an iterator of parameters, so that only its frame distinguishes it from others.

    Args:
        caller: what iterates over parameters.
    """
    return caller.f_globals is vars(torch.nn.utils.clip_grad)
