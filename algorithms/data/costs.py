"""What samples cost: given, computed, or fitted to measured steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from bagua_kernels.algorithms.data.order import Costs


class Dataset(Protocol):
    """A dataset by number of sample, as `torch.utils.data.Dataset`."""

    def __getitem__(self, index: Any, /) -> Any: ...


# Computes a sample's cost; a column's name; or the costs of all.
Complexity: TypeAlias = "Callable[[Any], float] | str | Sequence[float] | npt.NDArray[Any] | torch.Tensor"


def costs_of(dataset: Dataset, complexity: Complexity) -> Costs:
    """Returns the cost of each sample, shape (samples,).

    Args:
        dataset: with a length.
        complexity: a function of a sample; or the name of a column, which `dataset[name]` returns; or the costs themselves.

    Raises:
        TypeError: the dataset has no length.
        ValueError: there are not as many costs as samples, or one is not positive and finite.
    """
    if not isinstance(dataset, Sized):
        raise TypeError(f"expected a dataset with a length, got {type(dataset).__name__}")
    samples = len(dataset)
    if callable(complexity):
        costs = np.fromiter((complexity(dataset[index]) for index in range(samples)), np.float64, samples)
    else:
        column = dataset[complexity] if isinstance(complexity, str) else complexity
        costs = np.asarray(column, dtype=np.float64)
    if costs.shape != (samples,):
        raise ValueError(f"expected one cost for each of {samples} samples, got an array of shape {costs.shape}")
    wrong = np.flatnonzero(~(np.isfinite(costs) & (costs > 0)))
    if len(wrong):
        raise ValueError(
            f"costs have to be positive and finite, got {costs[wrong[0]]} for sample {wrong[0]} and {len(wrong) - 1} more: "
            "leave such samples out of the dataset, or add a constant for what each sample costs in any case"
        )
    return costs


@dataclass(frozen=True)
class LengthCost:
    """What a sample of length L costs: `linear * L + quadratic * L^2`, as a transformer does, in seconds or any other unit.

    Attributes:
        linear: of each element, for what works on elements one by one.
        quadratic: of each pair of elements, for attention.
        fixed: of a step whatever its samples are; no part of a sample's cost.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    fixed: float = 0.0

    def __call__(self, lengths: npt.ArrayLike) -> Costs:
        """Returns the cost of samples of these lengths, of the same shape."""
        found = np.asarray(lengths, dtype=np.float64)
        return self.linear * found + self.quadratic * found * found

    @classmethod
    def fit(cls, batches: Sequence[Sequence[int]], seconds: Sequence[float]) -> LengthCost:
        """Fits the costs to measured steps: least squares of relative errors, without negative costs.

        Args:
            batches: the lengths of the samples of each step; if they were padded, the padded lengths.
            seconds: that each step took, positive.

        Raises:
            ValueError: the steps are too few, or their lengths too similar.
        """
        if len(batches) != len(seconds) or min(seconds, default=0.0) <= 0:
            raise ValueError(f"expected a positive time for each step, got {len(batches)} steps and {list(seconds)}")
        sums = [[1.0, float(sum(one)), float(sum(length * length for length in one))] for one in batches]
        # Divided by the time, all steps count alike, whether short or long.
        rows = np.array(sums) / np.asarray(seconds)[:, None]
        if np.linalg.matrix_rank(rows) < rows.shape[1]:
            raise ValueError(
                f"expected steps of at least three different lengths, got {len(batches)} steps of {batches}"
            )
        best, least = np.zeros(3), np.inf
        for kept in itertools.product((False, True), repeat=3):
            some = [index for index, keep in enumerate(kept) if keep]
            found = np.zeros(3)
            found[some] = np.linalg.lstsq(rows[:, some], np.ones(len(rows)), rcond=None)[0]
            error = float(np.square(rows @ found - 1).sum())
            if (found >= 0).all() and error < least:
                best, least = found, error
        fixed, linear, quadratic = best.tolist()
        if linear == quadratic == 0:
            raise ValueError(f"the times {list(seconds)} do not grow with the lengths {batches}")
        return cls(linear, quadratic, fixed)
