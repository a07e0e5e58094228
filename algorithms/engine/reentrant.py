"""Detects backward passes that run inside of another one."""

from __future__ import annotations

import sys

from torch.utils.checkpoint import CheckpointFunction


def refuse_reentrant() -> None:
    """Raises within the backward pass that a reentrant checkpoint runs inside of backward.

    Its end is not that of the whole: the gradients of all other parameters are not there yet.
    """
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code is CheckpointFunction.backward.__code__:
            raise RuntimeError(
                "gradients came out of a reentrant activation checkpoint, which runs a backward pass of its own: use "
                "torch.utils.checkpoint.checkpoint(…, use_reentrant=False)"
            )
