"""A bidirectional encoder of text, some of whose characters are masked."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from bench.models import metrics
from bench.models.data import Data
from examples import corpus

CONTEXT = 64  # characters of a window
MASK = corpus.SYMBOLS  # number of the symbol that stands for a masked character
SYMBOLS = corpus.SYMBOLS + 1
SHARE = 0.15  # of all characters, which are to be guessed
SHOWN_AS_MASK, SHOWN_AS_OTHER = 0.8, 0.1  # of these; the rest stay as they are
TEST_WINDOWS = 512  # of the text, about

loss = F.cross_entropy
metric = metrics.accuracy


def masked(windows: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks characters (Devlin et al., 2019, section 3.1); returns inputs and labels, each of the shape of `windows`.

    Masks are drawn once, so that they are the same for all ways to train.

    Args:
        windows: int64 numbers of characters.
        seed: of what is drawn.

    Returns:
        The windows with masks, and the characters that are to be guessed, with `metrics.IGNORED` for all others.
    """
    generator = torch.Generator().manual_seed(seed)
    guessed = torch.rand(windows.shape, generator=generator) < SHARE
    shown = torch.rand(windows.shape, generator=generator)
    others = torch.randint(corpus.SYMBOLS, windows.shape, generator=generator)
    x = windows.masked_fill(guessed & (shown < SHOWN_AS_MASK), MASK)
    x = torch.where(guessed & (shown >= 1 - SHOWN_AS_OTHER), others, x)
    return x, windows.masked_fill(~guessed, metrics.IGNORED)


def data() -> Data:
    """The text of the examples in windows, and a part of its validation text for testing.

    Raises:
        CorpusError: the text cannot be read.
    """
    text = corpus.load()
    training, _ = corpus.windows(text.training, CONTEXT)
    testing, _ = corpus.windows(text.validation, CONTEXT)
    testing = testing[:: max(1, len(testing) // TEST_WINDOWS)]
    return Data(*masked(training, 0), *masked(testing, 1), text.digest)


class Encoder(nn.Module):
    """Returns logits of the characters of windows, shape (batch, symbols, length), from numbers, shape (batch, length)."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        """Makes the layers.

        Args:
            width: numbers that stand for one character.
            layers: blocks of attention and a perceptron, each of about 12 width² parameters.
            heads: of each attention; a divisor of `width`.
        """
        super().__init__()
        self.characters, self.places = nn.Embedding(SYMBOLS, width), nn.Embedding(CONTEXT, width)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, corpus.SYMBOLS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.characters(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden)).transpose(1, 2)
        return logits


def network(width: int = 128, layers: int = 3, heads: int = 4) -> nn.Module:
    """Makes an `Encoder`; by default 0.64 M parameters."""
    return Encoder(width, layers, heads)
