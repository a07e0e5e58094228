"""Text of the examples: any text arrives as ASCII in two parts, and wrong files are refused with a reason."""

import gzip
import sys
from pathlib import Path

import pytest
import torch

from examples import corpus

WHOLE = corpus.BLOCK * corpus.EVERY


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A text whose blocks each consist of one character."""
    path = tmp_path / "text"
    path.write_bytes(b"".join(bytes([ord("A") + block]) * corpus.BLOCK for block in range(corpus.EVERY)) + b"rest")
    return path


def test_the_last_of_twenty_blocks_is_held_back(file: Path) -> None:
    found = corpus.load(file)
    assert found.name == "text"
    assert len(found.training) == WHOLE - corpus.BLOCK
    assert found.training.unique().tolist() == list(range(ord("A"), ord("A") + corpus.EVERY - 1))
    assert found.validation.tolist() == [ord("A") + corpus.EVERY - 1] * corpus.BLOCK


def test_may_be_gzipped(file: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    plain, unpacked = corpus.load(file), corpus.load(packed)
    assert torch.equal(plain.training, unpacked.training)
    assert plain.digest == unpacked.digest


def test_other_bytes_become_question_marks(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("é€".encode() * WHOLE)
    assert corpus.load(path).training.unique().tolist() == [ord("?")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"too short", f"text has 9 characters, expected {WHOLE} or more"),
        (gzip.compress(bytes(WHOLE))[:-9], "cannot be read.*--data PATH"),
        (None, "cannot be read: .*No such file"),
    ],
    ids=["short", "broken gzip", "missing"],
)
def test_is_refused_with_a_reason(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(corpus.CorpusError, match=message):
        corpus.load(path)


def test_windows_are_followed_by_the_next_character() -> None:
    x, y = corpus.windows(torch.arange(100), 7)
    assert x.shape == y.shape == (14, 7)
    assert torch.equal(y, x + 1)
    assert torch.equal(x.flatten(), torch.arange(98))


def test_python_s_own_source_is_the_same_each_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(corpus, "GCIDE", tmp_path / "nothing")
    first, second = corpus.load(), corpus.load()
    assert first.name.startswith("source of Python 3.")
    assert first.digest == second.digest
    assert len(first.training) + len(first.validation) > 2_000_000
    assert "__future__" in sys.stdlib_module_names
    text = bytes(first.training[:3000].tolist()).decode("ascii")
    assert "from __future__ import" in text


def test_the_dictionary_comes_first_where_it_is_installed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "GCIDE", file)
    assert corpus.load().name == "gcide"


def test_the_manual_is_text_of_its_own() -> None:
    found = corpus.manual()
    assert len(found.training) == 19 * len(found.validation) > 300_000
    assert found.digest != corpus.load().digest
