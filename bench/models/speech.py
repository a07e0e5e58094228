"""The language of spoken prompts of unequal length, from features of a spectrogram.

The prompts are those of Debian's packages `asterisk-core-sounds-*-wav`. All prompts of a language have one speaker. Therefore
the network also learns voices; English and Spanish are said to have the same one. No prompt for testing, whatever its language,
is among those for training.
"""

from __future__ import annotations

import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from bench.models import metrics
from bench.models.data import Data, Sequences
from examples.image_data import DatasetError

FOLDER = Path("/usr/share/asterisk/sounds")
LANGUAGES = ("en_US_f_Allison", "es_MX_f_Allison", "fr_CA_f_June", "it_IT_m_Carlo", "ru_RU_f_IvrvoiceRU")
RATE = 8000  # samples per second
WINDOW, HOP = 256, 160  # samples
BANDS = 40  # of the spectrogram
LONGEST = 6 * RATE  # samples of a prompt that are used; one in eleven is longer
TEST_SHARE = 0.2

loss = F.cross_entropy
metric = metrics.accuracy


def data() -> Data:
    """About 2,830 prompts in five languages, of 0.2 to 6 s; a fifth is for testing.

    `x` has the logarithms of energies in bands, 50 frames per second. `costs` are the numbers of frames.

    Raises:
        DatasetError: a language is not installed.
    """
    missing = [language for language in LANGUAGES if not (FOLDER / language).is_dir()]
    if missing:
        packages = " ".join(f"asterisk-core-sounds-{language[:2]}-wav" for language in missing)
        raise DatasetError(f"the prompts are in packages of Debian that are not installed: apt-get install {packages}")
    names, sounds, labels = [], [], []
    for label, language in enumerate(LANGUAGES):
        for file in sorted((FOLDER / language).rglob("*.wav")):
            sound = samples(file)
            if len(sound) >= WINDOW:
                names.append(file.relative_to(FOLDER / language).as_posix())
                sounds.append(features(sound))
                labels.append(label)
    return divided(names, sounds, labels)


def samples(file: Path) -> torch.Tensor:
    """Reads the beginning of a prompt, float32 from -1 to 1."""
    with wave.open(str(file)) as opened:
        content = opened.readframes(min(LONGEST, opened.getnframes()))
    return torch.from_numpy(np.frombuffer(content, "<i2").astype(np.float32) / 32768)


def bands() -> torch.Tensor:
    """Triangles at equal distances on the mel scale, shape (frequencies, `BANDS`)."""
    frequencies = torch.linspace(0, RATE / 2, WINDOW // 2 + 1)
    top = 2595 * torch.log10(torch.tensor(1 + RATE / 2 / 700))
    edges = 700 * (10 ** (torch.linspace(0, 1, BANDS + 2) * top / 2595) - 1)
    up = (frequencies[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    down = (edges[2:] - frequencies[:, None]) / (edges[2:] - edges[1:-1])
    return torch.minimum(up, down).clamp(min=0)


_BANDS = bands()
_HANN = torch.hann_window(WINDOW)


def features(sound: torch.Tensor) -> torch.Tensor:
    """Logarithms of energies in bands without their means over the prompt, shape (frames, `BANDS`)."""
    spectrum = torch.stft(sound, WINDOW, HOP, window=_HANN, return_complex=True).abs().square()
    energies = (spectrum.T @ _BANDS + 1e-6).log()
    return energies - energies.mean(0)


def divided(names: Sequence[str], sounds: Sequence[torch.Tensor], labels: Sequence[int]) -> Data:
    """Divides prompts by their names into a training and a test set.

    Args:
        names: of the prompts; those of one name are in the same set.
        sounds: features of each.
        labels: number of the language of each.
    """
    different = sorted(set(names))
    order = torch.randperm(len(different), generator=torch.Generator().manual_seed(0)).tolist()
    testing = {different[place] for place in order[: round(TEST_SHARE * len(different))]}
    parts = []
    for tests in (False, True):
        chosen = [place for place, name in enumerate(names) if (name in testing) == tests]
        own = [sounds[place] for place in chosen]
        x = Sequences(torch.cat(own), torch.tensor([len(each) for each in own]))
        parts.append((x, torch.tensor([labels[place] for place in chosen])))
    (x, y), (test_x, test_y) = parts
    return Data(x, y, test_x, test_y, costs=x.lengths.double())


class Recurrent(nn.Module):
    """Two convolutions over time, a GRU, and a mean over the frames of each prompt.

    A prompt has the same logits in any batch, for frames behind its end stay zero.
    """

    def __init__(self, width: int) -> None:
        """Makes the layers; `width` is that of each."""
        super().__init__()
        self.convolution1 = nn.Conv1d(BANDS, width, 5, stride=2, padding=2)
        self.convolution2 = nn.Conv1d(width, width, 5, stride=2, padding=2)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, len(LANGUAGES))

    def forward(self, frames: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Returns logits, shape (batch, languages).

        Args:
            frames: shape (batch, length, `BANDS`), zeros behind the end of a prompt.
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
