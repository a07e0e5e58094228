"""Spoken prompts of unequal length in five languages, as features: found on this machine, and never downloaded.

They are in Debian's packages `asterisk-core-sounds-{en,es,fr,it,ru}-wav`. All prompts of a language have one speaker.
"""

from __future__ import annotations

import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

FOLDER = Path("/usr/share/asterisk/sounds")
LANGUAGES = ("en_US_f_Allison", "es_MX_f_Allison", "fr_CA_f_June", "it_IT_m_Carlo", "ru_RU_f_IvrvoiceRU")
RATE = 8000  # samples per second
WINDOW, HOP = 256, 160  # samples
BANDS = 40  # of the spectrogram
LONGEST = 6 * RATE  # samples of a prompt that are used; one in eleven is longer
TEST_SHARE = 0.2


@dataclass(frozen=True)
class Prompts:
    """Prompts in any order.

    Attributes:
        features: of each prompt, float32 of shape (frames, `BANDS`): logarithms of energies, 50 frames per second.
        labels: numbers of the languages, int64 of shape (prompts,).
    """

    features: Sequence[torch.Tensor]
    labels: torch.Tensor


def locate() -> list[Path]:
    """Returns the folder of each language.

    Raises:
        FileNotFoundError: a language is not installed; the message contains the remedy.
    """
    missing = [language for language in LANGUAGES if not (FOLDER / language).is_dir()]
    if missing:
        packages = " ".join(f"asterisk-core-sounds-{language[:2]}-wav" for language in missing)
        raise FileNotFoundError(f"the prompts are in packages of Debian that are not installed: apt install {packages}")
    return [FOLDER / language for language in LANGUAGES]


def load() -> tuple[Prompts, Prompts]:
    """Reads about 2,830 prompts of 0.03 to 6 s; returns those for training and the fifth that is for testing.

    Raises:
        FileNotFoundError: see `locate`.
    """
    names, features, labels = [], [], []
    for label, folder in enumerate(locate()):
        for file in sorted(folder.rglob("*.wav")):
            sound = samples(file)
            if len(sound) >= WINDOW:
                names.append(file.relative_to(folder).as_posix())
                features.append(features_of(sound))
                labels.append(label)
    return divided(names, features, labels)


def samples(file: Path) -> torch.Tensor:
    """Reads the beginning of a prompt, float32 from -1 to 1."""
    with wave.open(str(file)) as opened:
        content = opened.readframes(min(LONGEST, opened.getnframes()))
    return torch.from_numpy(np.frombuffer(content, "<i2").astype(np.float32) / 32768)


def features_of(sound: torch.Tensor) -> torch.Tensor:
    """Returns logarithms of energies in bands without their means over the prompt, shape (frames, `BANDS`)."""
    spectrum = torch.stft(sound, WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True).abs().square()
    energies = (spectrum.T @ _TRIANGLES + 1e-6).log()
    return energies - energies.mean(0)


def _triangles() -> torch.Tensor:
    """Weights of frequencies in bands at equal distances on the mel scale, shape (frequencies, `BANDS`)."""
    frequencies = torch.linspace(0, RATE / 2, WINDOW // 2 + 1)
    top = 2595 * torch.log10(torch.tensor(1 + RATE / 2 / 700))
    edges = 700 * (10 ** (torch.linspace(0, 1, BANDS + 2) * top / 2595) - 1)
    up = (frequencies[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    down = (edges[2:] - frequencies[:, None]) / (edges[2:] - edges[1:-1])
    return torch.minimum(up, down).clamp(min=0)


_TRIANGLES = _triangles()


def divided(names: Sequence[str], features: Sequence[torch.Tensor], labels: Sequence[int]) -> tuple[Prompts, Prompts]:
    """Divides prompts by their names, which all languages have in common, into those for training and for testing."""
    different = sorted(set(names))
    order = torch.randperm(len(different), generator=torch.Generator().manual_seed(0)).tolist()
    testing = {different[place] for place in order[: round(TEST_SHARE * len(different))]}
    parts = []
    for tests in (False, True):
        chosen = [place for place, name in enumerate(names) if (name in testing) == tests]
        own = torch.tensor([labels[place] for place in chosen])
        parts.append(Prompts([features[place] for place in chosen], own))
    first, second = parts
    return first, second
