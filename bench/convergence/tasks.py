"""What `bench.convergence` trains: small tasks, each with its data, its model and its learning rates."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from bench.models import metrics
from bench.models.data import Data
from examples import corpus, image_data
from examples.transformer import Transformer

ROOT = Path(__file__).resolve().parents[2]
DIGITS_FOLDER = Path("data/scikit-learn")
DIGITS_FILE = "sklearn/datasets/data/digits.csv.gz"


@dataclass(frozen=True)
class Task:
    """What every algorithm is given.

    Attributes:
        name: on the command line.
        data: loads it.
        model: makes it, with PyTorch's global generator.
        batch: examples a rank and step.
        steps: of a run.
        rate: learning rate; of SGD with momentum m it is (1 - m) times that.
        momentum: of the optimizer, where an algorithm has none itself.
        schedule: factor of the learning rate, of the part of all steps that is done.
        looked_at: training examples of which the final loss is taken; all if there are fewer.
        ranks: how many train together.
        optimizer: "sgd", "adagrad" or "adamw".
        seeds: runs of each row, by default.
        validates: True if the loss is that of the test set, which no rank trains on.
        warm: steps with exact means before those that are counted. All rows of a seed begin with the model that they lead to.
        loss: of a model's outputs and labels, a mean over examples.
        metric: of outputs and labels; a larger one is better.
        metric_name: in results and tables.
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
    ranks: int = 4
    optimizer: str = "sgd"
    seeds: int = 2
    validates: bool = False
    warm: int = 0
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.cross_entropy
    metric: Callable[[torch.Tensor, torch.Tensor], float] = metrics.accuracy
    metric_name: str = "accuracy"


def digits() -> Data:
    """The 1,797 digits of 8x8 pixels that come with scikit-learn; a fifth of each class is set aside for testing."""
    with gzip.open(digits_file(), "rt") as file:
        table = np.loadtxt(file, delimiter=",").astype(np.uint8)
    train, test = image_data.split(table[:, :-1], table[:, -1])
    x, test_x = (torch.from_numpy(part[0].astype(np.float32)) / 16 for part in (train, test))
    y, test_y = (torch.from_numpy(part[1].astype(np.int64)) for part in (train, test))
    return Data(x, y, test_x, test_y)


def digits_file() -> Path:
    """Finds the file, without importing scikit-learn, which would ask for more packages."""
    spec = importlib.util.find_spec("sklearn")
    installed = [Path(spec.origin).parents[2]] if spec and spec.origin else []
    for folder in (*installed, DIGITS_FOLDER):
        if (folder / DIGITS_FILE).exists():
            return folder / DIGITS_FILE
    raise image_data.DatasetError(
        "the digits are in the Python package scikit-learn, which is not installed: "
        f"pip install --no-deps --target {DIGITS_FOLDER} scikit-learn"
    )


def fashion() -> Data:
    """Fashion-MNIST, as the example reads it."""
    train, test = image_data.load("fashion-mnist")
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


CONTEXT = 64  # characters that the transformer sees
TEST_WINDOWS = 512  # of the text, about


def characters() -> Data:
    """The text of Python's own language reference, which `help()` shows, in windows; its last tenth is for testing."""
    topics = importlib.import_module("pydoc_data.topics").topics
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    stream = torch.tensor(list(text))
    x, y = corpus.windows(stream, CONTEXT)
    kept = len(x) - len(x) // 10
    return Data(x[:kept], y[:kept], x[kept:], y[kept:], hashlib.sha256(text).hexdigest()[:16])


def text() -> Data:
    """The text of `examples/train_text.py` in windows, and a part of its validation text for testing."""
    found = corpus.load()
    x, y = corpus.windows(found.training, CONTEXT)
    test_x, test_y = corpus.windows(found.validation, CONTEXT)
    every = max(1, len(test_x) // TEST_WINDOWS)
    return Data(x, y, test_x[::every], test_y[::every], found.digest)


def transformer() -> nn.Module:
    """Three layers of width 160, 0.98 M parameters."""
    return Transformer(width=160, layers=3)


def one_drop(done: float) -> float:
    return 1.0 if done < 0.7 else 0.1


def up(done: float) -> float:
    """Linearly up in the first fifth."""
    return min(1.0, done / 0.2)


def up_and_down(done: float) -> float:
    """Linearly up in the first fifth, and down to zero."""
    return done / 0.2 if done < 0.2 else (1 - done) / 0.8


TASKS = {
    "digits": Task("digits", digits, perceptron, 16, 2000, 0.1, 0.0, one_drop),
    "ring": Task("ring", digits, perceptron, 16, 2000, 0.1, 0.0, one_drop, ranks=8),
    "fashion": Task("fashion", fashion, convolutions, 16, 937, 0.2, 0.0, up_and_down),
    "characters": Task(
        "characters",
        characters,
        Transformer,
        8,
        600,
        3e-3,
        0.0,
        up_and_down,
        looked_at=2000,
        ranks=2,
        optimizer="adamw",
    ),
    "text": Task(
        "text",
        text,
        transformer,
        4,
        1500,
        1e-3,
        0.0,
        up_and_down,
        optimizer="adamw",
        seeds=3,
        validates=True,
        warm=500,
    ),
}
