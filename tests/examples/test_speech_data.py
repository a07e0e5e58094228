"""The prompts of the example: features, and which prompts are for testing."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from examples import speech_data


def write(file: Path, seconds: float, frequency: float) -> None:
    """Writes a tone."""
    time = np.arange(round(seconds * speech_data.RATE)) / speech_data.RATE
    file.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(file), "wb") as opened:
        opened.setnchannels(1)
        opened.setsampwidth(2)
        opened.setframerate(speech_data.RATE)
        opened.writeframes((16384 * np.sin(2 * np.pi * frequency * time)).astype("<i2").tobytes())


def test_prompts_of_all_languages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_data, "FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match="asterisk-core-sounds-en-wav asterisk-core-sounds-es-wav"):
        speech_data.load()
    for place, language in enumerate(speech_data.LANGUAGES):
        for number in range(5):
            write(tmp_path / language / "digits" / f"{number}.wav", 0.1 * (1 + number), 300 + 500 * place)
        write(tmp_path / language / "empty.wav", 0.0, 300)
    training, testing = speech_data.load()
    # One of five names is for testing, with all languages.
    assert training.labels.bincount().tolist() == [4] * 5
    assert testing.labels.tolist() == [0, 1, 2, 3, 4]
    assert len({len(each) for each in testing.features}) == 1
    assert len({len(each) for each in training.features}) == 4


def test_a_long_prompt_is_cut(tmp_path: Path) -> None:
    write(tmp_path / "long.wav", 1.5 * speech_data.LONGEST / speech_data.RATE, 440)
    sound = speech_data.samples(tmp_path / "long.wav")
    assert len(sound) == speech_data.LONGEST
    assert sound.abs().max() == pytest.approx(0.5, abs=1e-3)


def test_features_show_tones() -> None:
    time = torch.arange(4000) / speech_data.RATE
    # The first half is low and the second is high.
    frequency = torch.where(time < 0.25, 300.0, 3000.0)
    found = speech_data.features_of((2 * torch.pi * frequency * time).sin())
    assert found.shape == (4000 // speech_data.HOP + 1, speech_data.BANDS)
    assert found[:10].mean(0).argmax() < found[-10:].mean(0).argmax()
    torch.testing.assert_close(found.mean(0), torch.zeros(speech_data.BANDS), atol=1e-4, rtol=0)


@pytest.mark.skipif(not speech_data.FOLDER.exists(), reason="asterisk-core-sounds-en-wav is not installed")
def test_the_files_of_the_packages() -> None:
    file = min((speech_data.FOLDER / speech_data.LANGUAGES[0]).rglob("*.wav"))
    sound = speech_data.samples(file)
    assert 0.01 < sound.abs().max() <= 1
