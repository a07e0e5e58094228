"""The language of spoken prompts of unequal length, from features of a spectrogram.

All prompts of a language have one speaker, so that the network also learns voices. No prompt for testing, whatever its
language, is among those for training.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from bench.models import metrics
from bench.models.data import Data, Sequences
from examples import speech_data

loss = F.cross_entropy
metric = metrics.accuracy


def data() -> Data:
    """The prompts of the example, about 2,830; a fifth is for testing. `costs` are the numbers of frames.

    Raises:
        FileNotFoundError: the prompts are not on this machine.
    """
    return joined(*speech_data.load())


def joined(training: speech_data.Prompts, testing: speech_data.Prompts) -> Data:
    """Makes the data of prompts."""
    x, test_x = (
        Sequences(torch.cat([*part.features]), torch.tensor([len(each) for each in part.features]))
        for part in (training, testing)
    )
    return Data(x, training.labels, test_x, testing.labels, costs=x.lengths.double())


class Recurrent(nn.Module):
    """Two convolutions over time, a GRU, and a mean over the frames of each prompt.

    A prompt has the same logits in any batch, for frames behind its end stay zero.
    """

    def __init__(self, width: int) -> None:
        """Makes the layers; `width` is that of each."""
        super().__init__()
        self.convolution1 = nn.Conv1d(speech_data.BANDS, width, 5, stride=2, padding=2)
        self.convolution2 = nn.Conv1d(width, width, 5, stride=2, padding=2)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, len(speech_data.LANGUAGES))

    def forward(self, frames: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Returns logits, shape (batch, languages).

        Args:
            frames: shape (batch, length, bands), zeros behind the end of a prompt.
            lengths: int64 frames of each prompt, shape (batch,).
        """
        hidden, kept = frames.transpose(1, 2), lengths
        for convolution in (self.convolution1, self.convolution2):
            # Of two frames one is left.
            kept = (kept + 1) // 2
            hidden = F.relu(convolution(hidden))
            hidden = hidden * _within(kept, hidden.shape[2])[:, None]
        states, _ = self.recurrent(hidden.transpose(1, 2))
        mean = (states * _within(kept, states.shape[1])[..., None]).sum(1) / kept[:, None]
        logits: torch.Tensor = self.out(mean)
        return logits


def _within(lengths: torch.Tensor, longest: int) -> torch.Tensor:
    """True for frames before the end, shape (batch, longest)."""
    return torch.arange(longest) < lengths[:, None]


def network(width: int = 128) -> nn.Module:
    """Makes a `Recurrent`; by default 0.21 M parameters."""
    return Recurrent(width)
