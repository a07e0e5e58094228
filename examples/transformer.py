"""A small transformer that predicts the next character of a text, for `train_text.py` and `bench.convergence`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """One layer of a transformer: causal attention, then two linear layers, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.second_norm(x))))
        return out


class Transformer(nn.Module):
    """Returns logits of the next character for each place of windows of a text.

    Inputs are numbers of characters, shape (batch, length). Logits have the shape (batch, symbols, length), as
    `F.cross_entropy` takes them. By default it has 0.37 M parameters.
    """

    def __init__(self, symbols: int = 128, width: int = 96, layers: int = 3, heads: int = 4, context: int = 64) -> None:
        """Makes the layers.

        Args:
            symbols: number of different characters.
            width: numbers that stand for one character.
            layers: number of `Block`s, each of about 12 width² parameters.
            heads: of each attention; a divisor of `width`.
            context: characters of a window, at most.
        """
        super().__init__()
        self.characters, self.places = nn.Embedding(symbols, width), nn.Embedding(context, width)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.characters(x) + self.places.weight[: x.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(hidden))).transpose(1, 2)
        return logits
