"""Maps a rule over flat arrays in NumPy: the rule itself, called on all elements at once."""

from __future__ import annotations

import numpy as np
import torch

from bagua_kernels.jit._numpy import load, meant, plain, store_results
from bagua_kernels.rules.optimizers import ElementwiseRule


@meant
def apply(rule: ElementwiseRule, arrays: tuple[torch.Tensor, ...], scalars: tuple[float, ...]) -> None:
    """See `bagua_kernels.launchers.elementwise.apply`."""
    real = np.float64 if arrays[0].dtype == torch.float64 else np.float32
    results = plain(rule.function, real)(*map(load, arrays), *map(real, scalars))
    store_results(arrays.__getitem__, rule.writes, results)
