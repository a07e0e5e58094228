"""Models whose training steps are measured: small enough that four ranks share two cores, with gradients that fill a link."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

from bench.models import bert, resnet

CLASSES, IMAGES = 100, 16
VOCABULARY, SEQUENCES, LENGTH, WIDTH = 256, 2, 64, 384
SIDE, VECTORS = 512, 224
CHARACTERS = 8  # windows of text


class FullyConnected(nn.Module):
    """Four small convolutions before large matrices, 19.4 M parameters: much to send for little arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        channels = (3, 32, 64, 64, 32)
        convolutions: list[nn.Module] = []
        for i, (before, after) in enumerate(itertools.pairwise(channels)):
            convolutions += [nn.Conv2d(before, after, 3, stride=2 if i else 1, padding=1), nn.ReLU()]
        self.convolutions = nn.Sequential(*convolutions, nn.Flatten())
        self.matrices = nn.Sequential(
            nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, CLASSES)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.matrices(self.convolutions(x))
        return out


class Transformer(nn.Module):
    """Six layers of an encoder, 10.9 M parameters: gradients come evenly over the whole of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(self.embedding(x) + self.position))
        return out.flatten(0, 1)


class Residual(nn.Module):
    """Two convolutions beside a shortcut, the basic block of He et al., CVPR 2016."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 of He et al., CVPR 2016, with the first convolution and pooling for ImageNet: 62 gradients, 11.7 M numbers."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    widths = (64, 64, 128, 256, 512)
    blocks = [
        part
        for i, (before, after) in enumerate(itertools.pairwise(widths))
        for part in (Residual(before, after, 2 if i else 1), Residual(after, after, 1))
    ]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def small() -> nn.Module:
    """A perceptron of 1.06 M parameters, whose batches make a step take about 50 ms on half a core."""
    return nn.Sequential(nn.Linear(SIDE, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "fc": FullyConnected,
    "tr": Transformer,
    "resnet18": resnet18,
    "small": small,
    # Few parameters for their arithmetic.
    "resnet": resnet.network,
    "bert": bert.network,
}


def model(name: str) -> nn.Module:
    """A new copy, the same on all ranks."""
    torch.manual_seed(0)
    return MODELS[name]()


def batch(name: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's inputs and classes: steps differ only in the parameters they find."""
    generator = torch.Generator().manual_seed(1 + rank)
    if name == "tr":
        words = torch.randint(VOCABULARY, (2, SEQUENCES, LENGTH), generator=generator)
        return words[0], words[1].flatten()
    if name == "small":
        return torch.randn(VECTORS, SIDE, generator=generator), torch.randint(CLASSES, (VECTORS,), generator=generator)
    if name == "bert":
        words = torch.randint(bert.MASK, (2, CHARACTERS, bert.CONTEXT), generator=generator)
        return words[0], words[1]
    if name == "resnet":
        x = torch.randn(IMAGES, 1, 28, 28, generator=generator)
        return x, torch.randint(resnet.CLASSES, (IMAGES,), generator=generator)
    images, side, classes = (IMAGES, 32, CLASSES) if name == "fc" else (8, 224, 1000)
    x = torch.randn(images, 3, side, side, generator=generator)
    return x, torch.randint(classes, (images,), generator=generator)
