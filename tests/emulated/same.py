"""Runs something on a backend and on NumPy, and compares the bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bagua_kernels import knobs
from tests.conftest import Target

# What a run returns on a device, to which it brings its tensors.
Run = Callable[[torch.device], Sequence[torch.Tensor]]


def on_both(target: Target, run: Run) -> list[torch.Tensor]:
    """Returns the run's tensors on the target, brought to the CPU, which must have the bytes that NumPy makes."""
    found = [tensor.cpu() for tensor in run(target.device)]
    with knobs.override(knobs.BACKEND, "numpy"):
        expected = run(torch.device("cpu"))
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.dtype == theirs.dtype
        assert torch.equal(bits(ours), bits(theirs)), f"tensor {place} differs from NumPy's"
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, in which NaNs are equal."""
    if not tensor.is_floating_point():
        return tensor
    bare = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor).view(bare)
