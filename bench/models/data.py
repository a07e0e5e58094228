"""Examples to train and to test with, whose inputs may be several tensors or of unequal length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn


class Inputs(Protocol):
    """Inputs of examples. A tensor is one; so is any class that is indexed in the same way."""

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def __getitem__(self, chosen: Any, /) -> Any:
        """Returns the inputs of a batch: a tensor, or a tuple of several.

        Args:
            chosen: int64 numbers of examples, shape (batch,), or a slice of them.
        """
        ...


@dataclass(frozen=True)
class Data:
    """A training and a test set.

    Attributes:
        x: inputs: a tensor such as float32 images, or another class of `Inputs`.
        y: labels, the examples along the first dimension.
        test_x: inputs of the test set.
        test_y: labels of the test set.
        digest: start of the data's SHA-256 where the data may differ between machines; else empty.
        costs: float64 cost of each training example, where examples differ in it; ranks then get examples of similar cost.
    """

    x: Inputs
    y: torch.Tensor
    test_x: Inputs
    test_y: torch.Tensor
    digest: str = ""
    costs: torch.Tensor | None = None


@dataclass(frozen=True)
class Columns:
    """Inputs of several tensors, such as numbers of rows of tables beside dense values.

    Attributes:
        tensors: the examples along the first dimension of each.
    """

    tensors: tuple[torch.Tensor, ...]

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, chosen: Any, /) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[chosen] for tensor in self.tensors)


@dataclass(frozen=True)
class Sequences:
    """Inputs of unequal length, one after the other in one tensor.

    Attributes:
        frames: of all examples, shape (sum of lengths, features).
        lengths: int64 frames of each example.
    """

    frames: torch.Tensor
    lengths: torch.Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, chosen: Any, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a batch, filled up with zeros to its longest example, shape (batch, length, features), and its lengths."""
        lengths = self.lengths[chosen]
        first = (self.lengths.cumsum(0) - self.lengths)[chosen]
        parts = [self.frames[at : at + length] for at, length in zip(first.tolist(), lengths.tolist(), strict=True)]
        return nn.utils.rnn.pad_sequence(parts, batch_first=True), lengths


def outputs(model: Callable[..., torch.Tensor], x: Any) -> torch.Tensor:
    """Calls a model with a batch of `Inputs`: with one argument, or with as many as there are tensors."""
    return model(*x) if isinstance(x, tuple) else model(x)
