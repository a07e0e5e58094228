"""Shapes of well-known models, and steps that were published."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

Matrices = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Model:
    """A model.

    Attributes:
        matrices: rows and columns; convolutions have a row per output channel.
        seconds: of a step on one GPU, without communication.
        source: of that time.
    """

    matrices: Matrices
    seconds: float
    source: str


def vgg16() -> Matrices:
    """Simonyan and Zisserman, ICLR 2015, configuration D."""
    channels = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    convolutions = [(after, 9 * before) for before, after in itertools.pairwise(channels)]
    return (*convolutions, (4096, 512 * 49), (4096, 4096), (1000, 4096))


def resnet50() -> Matrices:
    """He et al., CVPR 2016, table 1."""
    found, before = [(64, 3 * 49)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        found.append((4 * width, before))
        for _ in range(blocks):
            found += [(width, before), (width, 9 * width), (4 * width, width)]
            before = 4 * width
    return (*found, (1000, 2048))


def encoder(layers: int, width: int, words: int, positions: int) -> Matrices:
    """Layers of attention and a perceptron of four times the width, and embeddings."""
    layer = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    return (*layer * layers, (words, width), (positions, width))


_BAGUA = "V100, from BAGUA's figures of asynchronous training"
MODELS: dict[str, Callable[[], Model]] = {
    "vgg16": lambda: Model(vgg16(), 0.142, f"32 images on a {_BAGUA}"),
    "resnet50": lambda: Model(resnet50(), 0.173, "32 images on a V100, BAGUA's tests on 8 GPUs"),
    "bert_large": lambda: Model(encoder(24, 1024, 30522, 512), 0.53, f"6 texts on a {_BAGUA}"),
    "bert_base": lambda: Model(encoder(12, 768, 30522, 512), 0.17, "32 % of bert_large's, as its arithmetic"),
    "gpt2": lambda: Model(encoder(12, 768, 50257, 1024), 0.25, "assumed; pass --step"),
}
