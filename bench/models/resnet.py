"""A residual network on Fashion-MNIST: batch norm, and parameters spread over many layers."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from bench.models import metrics
from bench.models.data import Data
from examples import image_data

WIDTHS = (16, 32, 64, 128)
CLASSES = 10

loss = F.cross_entropy
metric = metrics.accuracy


def data() -> Data:
    """Fashion-MNIST, 60,000 images of 28x28 pixels for training and 10,000 for testing.

    Raises:
        DatasetError: it is neither on this machine nor can it be downloaded.
    """
    train, test = image_data.load("fashion-mnist")
    return Data(*train.tensors, *test.tensors)


class Block(nn.Module):
    """Two convolutions beside a shortcut (He et al., CVPR 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        """Makes the layers.

        Args:
            before: channels of the input.
            after: channels of the output.
            stride: of the first convolution and of the shortcut.
        """
        super().__init__()
        self.convolution1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.convolution2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm1(self.convolution1(x)))
        return F.relu(self.norm2(self.convolution2(inner)) + self.shortcut(x))


def network(widths: tuple[int, ...] = WIDTHS) -> nn.Module:
    """Makes one `Block` for each width, as for CIFAR: 0.31 M parameters in 38 tensors, and 12 batch norms.

    Args:
        widths: channels; all blocks but the first halve height and width.
    """
    stem = [nn.Conv2d(1, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    blocks = [Block(widths[0], widths[0], 1), *(Block(*pair, 2) for pair in itertools.pairwise(widths))]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))
