"""Tables of algorithms, codecs, kernels and versions: each has all rows, with the values of the pages and of the package."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bagua_kernels import algorithms, knobs
from bagua_kernels.command import sent
from bagua_kernels.command.algorithms import rows
from bagua_kernels.compression import codec
from tests.command.calls import call, values

PAGE = (Path(__file__).parents[2] / "docs/algorithms/README.md").read_text()
N, RANKS = 1 << 22, 16
# What a rank sends, by the column of the page: of b bytes, P ranks, H steps of a round, groups of S.
FORMULAS = {
    "`b`": lambda b, h: b,
    "`2 b`": lambda b, h: 2 * b,
    "`b (P-1)`": lambda b, h: b * (RANKS - 1),
    "`b (P-1)/H`": lambda b, h: b * (RANKS - 1) / h,
    "`2 b (P-1)/P`": lambda b, h: 2 * b * (RANKS - 1) / RANKS,
    "`2 b (P-1)/(P H)`": lambda b, h: 2 * b * (RANKS - 1) / (RANKS * h),
    "`2 b (S-1)/S`": lambda b, h: 2 * b * 3 / 4,
    "by the codec": lambda b, h: 2 * b * (RANKS - 1) / RANKS,
    "by its choice": lambda b, h: 2 * b * (RANKS - 1) / RANKS,
}
FITS = {"any": "yes", "by the codec": "yes", "its own Adam": "its own", "SGD": "no", "SGD without momentum": "no"}


@pytest.fixture
def numpy() -> Iterator[None]:
    with knobs.override(knobs.BACKEND, "numpy"):
        yield


def on_the_page() -> dict[str, list[str]]:
    """The cells of the two tables of algorithms, by the names for `from_spec`."""
    found = re.findall(r"^\| \[`(\w+)`\]\([^)]*\) \| (.*) \|$", PAGE, re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in found}


def test_bytes_of_algorithms_are_those_of_the_page() -> None:
    page = on_the_page()
    found = {row["name"]: row for row in rows(N, RANKS)}
    assert list(found) == algorithms.names()
    assert set(page) == set(found)
    for name, (kind, each, formula, *_) in page.items():
        row = found[name]
        assert f"`{row['class']}`" == kind
        steps = re.search(r"\d+", row["exchanges"])
        # The page has b with three digits, and PowerSGD's for matrices of twice as many rows.
        b = float(each) * (2 if name == "powersgd" else 1)
        expected = FORMULAS[formula](b * N, int(steps[0]) if steps else 1)
        assert row["bytes_per_step"] == pytest.approx(expected, rel=0.025), name


def test_algorithms_go_with_adam_as_on_the_page() -> None:
    page = on_the_page()
    for row in rows(N, RANKS):
        # The table of algorithms on parameters has no such column: these go with any optimizer.
        cells = page[row["name"]]
        expected = FITS[cells[5]] if len(cells) == 7 and cells[5] in FITS else "yes"
        assert row["goes_with_adam"] == ("with Muon" if row["name"] == "mu_loco" else expected), row["name"]
        assert row["summary"].endswith(".")


def test_a_rank_alone_sends_nothing() -> None:
    assert {row["bytes_per_step"] for row in rows(N, 1)} == {0}


@pytest.mark.parametrize("elements", [1, 1000, 25_000_000])
def test_low_rank_takes_all_for_matrices(elements: int) -> None:
    """A model of other sizes sends no vectors, which PowerSGD would not compress."""
    assert sent._of_matrices(elements).elements == pytest.approx(elements, rel=0.03)


def test_table_of_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    told = values(capsys, "algorithms", "--parameters", str(N), "--ranks", str(RANKS))
    assert told == {"parameters": N, "ranks": RANKS, "algorithms": rows(N, RANKS)}
    out = call(capsys, "algorithms").out
    assert all(f"│ {name} " in out for name in algorithms.names())
    assert "175,000,000" in out


def test_table_of_codecs(capsys: pytest.CaptureFixture[str], numpy: None) -> None:
    told = values(capsys, "codecs", "--elements", "1000")
    assert [row["name"] for row in told["codecs"]] == codec.names()
    for row in told["codecs"]:
        payload = codec.from_spec(row["name"]).encode(torch.linspace(-1, 1, 1000))
        assert math.isclose(1000 * row["bytes_per_element"], payload.numel())
    errors = {row["name"]: row["error"] for row in told["codecs"]}
    assert (errors["identity"], errors["qsgd"], errors["sign"]) == ("none", "unbiased", "biased")
    out = call(capsys, "codecs").out
    assert "0.1406" in out
    assert all(f"│ {name} " in out for name in codec.names())


def test_kernels_are_timed(capsys: pytest.CaptureFixture[str], numpy: None) -> None:
    told = values(capsys, "bench", "--elements", "512", "--repeats", "1")
    names = [row["kernel"] for row in told["kernels"]]
    assert names[:3] == ["copy", "minmax_uint8 encode", "minmax_uint8 decode"]
    assert names[3:] == ["sign encode", "sign decode", "AdamW step", "torch.optim.AdamW step"]
    assert all(set(row) == {"kernel", "milliseconds", "GB_per_s", "times_a_copy"} for row in told["kernels"])
    assert told["kernels"][0]["times_a_copy"] == 1
    assert "512 float32 elements on cpu" in call(capsys, "bench", "--elements", "512", "--repeats", "1").out


def test_a_gpu_that_is_not_there_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, err = call(capsys, "bench", "--device", "cuda")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "there is no GPU here" in err


def test_versions_and_devices(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("cupy", "cupy-cuda13x"):
            raise importlib.metadata.PackageNotFoundError(name)
        if name in ("cupy-cuda12x", "triton"):
            return f"1.2 of {name}"
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    told = values(capsys, "version")
    assert list(told["versions"]) == ["bagua-kernels", "python", "torch", "numba", "triton", "cupy"]
    assert told["versions"]["python"] == platform.python_version()
    assert told["versions"]["torch"] == real("torch")
    assert (told["versions"]["triton"], told["versions"]["cupy"]) == ("1.2 of triton", "1.2 of cupy-cuda12x")
    assert list(told["devices"]) == ["cpu", "cuda:0", "cuda:1"]
    monkeypatch.setattr("bagua_kernels.command.version._PACKAGES", {"cupy": ("cupy",)})
    assert "not installed" in call(capsys, "version").out
