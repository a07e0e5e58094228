"""What `bench.convergence` trains: two small tasks, each with its data, its model and its learning rates."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from examples import datasets

ROOT = Path(__file__).resolve().parents[1]
DIGITS_FOLDER = Path("data/scikit-learn")
DIGITS_FILE = "sklearn/datasets/data/digits.csv.gz"


@dataclass(frozen=True)
class Data:
    """A training and a test set.

    Attributes:
        x: inputs, float32.
        y: labels.
        test_x: inputs of the test set.
        test_y: labels of the test set.
    """

    x: torch.Tensor
    y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor


@dataclass(frozen=True)
class Task:
    """What every algorithm is given.

    Attributes:
        name: on the command line.
        data: loads it.
        model: makes it, with PyTorch's global generator.
        batch: examples a rank and step.
        steps: of a run.
        rate: learning rate of SGD without momentum; with momentum m it is (1 - m) times that.
        momentum: of the optimizer, where an algorithm has none itself.
        schedule: factor of the learning rate, of the part of all steps that is done.
        looked_at: training examples of which the final loss is taken; all if there are fewer.
    """

    name: str
    data: Callable[[], Data]
    model: Callable[[], nn.Module]
    batch: int
    steps: int
    rate: float
    momentum: float
    schedule: Callable[[float], float]
    looked_at: int = 10_000


def digits() -> Data:
    """The 1,797 digits of 8x8 pixels that come with scikit-learn; a fifth of each class is set aside for testing."""
    with gzip.open(digits_file(), "rt") as file:
        table = np.loadtxt(file, delimiter=",").astype(np.uint8)
    train, test = datasets.split(table[:, :-1], table[:, -1])
    x, test_x = (torch.from_numpy(part[0].astype(np.float32)) / 16 for part in (train, test))
    y, test_y = (torch.from_numpy(part[1].astype(np.int64)) for part in (train, test))
    return Data(x, y, test_x, test_y)


def digits_file() -> Path:
    """Finds the file, without importing scikit-learn, which would ask for more packages."""
    spec = importlib.util.find_spec("sklearn")
    installed = [Path(spec.origin).parents[1]] if spec and spec.origin else []
    for folder in (*installed, DIGITS_FOLDER):
        if (folder / DIGITS_FILE).exists():
            return folder / DIGITS_FILE
    raise datasets.DatasetError(
        "the digits are in the Python package scikit-learn, which is not installed: "
        f"pip install --no-deps --target {DIGITS_FOLDER} scikit-learn"
    )


def fashion() -> Data:
    """Fashion-MNIST, as the example reads it."""
    train, test = datasets.load("fashion-mnist")
    return Data(*train.tensors, *test.tensors)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def convolutions() -> nn.Module:
    """The network of `examples/train_images.py`."""
    # A script, whose neighbours it imports as top-level modules.
    sys.path.append(str(ROOT / "examples"))
    try:
        script: Any = importlib.import_module("train_images")
    finally:
        sys.path.remove(str(ROOT / "examples"))
    model: nn.Module = script.Net()
    return model


def one_drop(done: float) -> float:
    return 1.0 if done < 0.7 else 0.1


def up_and_down(done: float) -> float:
    """Linearly up in the first fifth, and down to zero."""
    return done / 0.2 if done < 0.2 else (1 - done) / 0.8


TASKS = {
    "digits": Task("digits", digits, perceptron, 16, 2000, 0.1, 0.0, one_drop),
    "fashion": Task("fashion", fashion, convolutions, 16, 937, 0.2, 0.0, up_and_down),
}
