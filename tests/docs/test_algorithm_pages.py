"""What docs/algorithms says: every algorithm has a page, its example runs, and tables are those of the code."""

from __future__ import annotations

import copy
import json
import re
import threading
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bagua_kernels import algorithms
from bagua_kernels.algorithms import (
    Algorithm,
    CompressedAllReduce,
    GradientAlgorithm,
    ModelAlgorithm,
    OuterLoop,
    RoundAlgorithm,
    names,
)
from bagua_kernels.algorithms.adam.momentum import MomentumAllReduce
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import Contractive
from tests.docs.option_tables import own
from tests.grids import folded, grid

FOLDER = Path(__file__).parents[2] / "docs" / "algorithms"
INDEX = (FOLDER / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.md")) if path.name != "README.md"}
ROW = re.compile(r"^\| \[`(?P<name>\w+)`\]\((?P<page>[\w-]+\.md)\) \|(?P<cells>.*)\|$", re.MULTILINE)
# By the algorithm's name: its page, and the other columns.
ROWS = {
    row["name"]: (row["page"], [cell.strip(" `") for cell in row["cells"].split("|")]) for row in ROW.finditer(INDEX)
}
BLOCKS = [(name, i, code) for name, text in [("README.md", INDEX), *PAGES.items()]
          for i, code in enumerate(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))]  # fmt: skip

every_row = folded(name=list(ROWS))
every_row_on_gradients = folded(
    name=[name for name in ROWS if issubclass(Algorithm.registered[name], GradientAlgorithm)]
)


def make_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40, 5))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.45)
    return net


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rank 1 has one batch more where a page says that this is allowed, and others than rank 0."""
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(8, 24, generator=generator), torch.arange(8) % 5) for _ in range(4)]


def run(code: CodeType, communicator: Communicator, here: threading.local) -> dict[str, Any]:
    here.communicator = communicator
    loader = batches(communicator.rank)
    if "join" in code.co_names:
        loader = loader[: 3 + communicator.rank]
    given: dict[str, Any] = {"torch": torch, "F": F, "net": make_net(), "loader": loader, "print": lambda *_: None}
    exec(code, given)
    return given


@grid(page__number__source=[pytest.param(*block, id=f"{block[0]}-{block[1]}") for block in BLOCKS])
def test_code_runs_on_two_ranks(page: str, number: int, source: str, ranks: threading.local) -> None:
    code = compile(source, page, "exec")

    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], Algorithm]:
        model = run(code, communicator, ranks)["model"]
        assert isinstance(model, Algorithm)
        if "backward" in source:
            stats = model.stats()
            assert stats.steps == 4
            assert stats.bytes_sent > 0 or "switch_to" in source
            used = "apply_in_backward" in source
            assert all(used if p.grad is None else p.grad.isfinite().all() for p in model.parameters())
        if "optimizer.step" in source:
            changed = [not torch.equal(a, b) for a, b in zip(model.parameters(), make_net().parameters(), strict=True)]
            assert all(changed)
        return [p.detach().clone() for p in model.parameters()], model

    (first, model), (second, _) = run_ranks(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    if page in PAGES:
        assert {row_page for row_page, cells in ROWS.values() if cells[0] == type(model).__name__} == {page}


def test_index_has_every_algorithm_and_no_other() -> None:
    assert set(ROWS) == set(names())
    assert sorted(page for page, _ in ROWS.values()) == sorted(PAGES)


def test_pages_are_short_and_begin_alike() -> None:
    for name, text in PAGES.items():
        lines = text.splitlines()
        assert len(lines) <= 60, name
        assert [line for line in lines if line.startswith("## ")] == [
            "## Steps", "## Options", "## Example", "## When", "## Source"
        ], name  # fmt: skip
        assert sum(page == name for page, _, _ in BLOCKS) == 1, name


@every_row
def test_page_names_the_algorithm_and_its_class(name: str) -> None:
    page, (cls, *_) = ROWS[name]
    assert PAGES[page].startswith(f"# {cls}\n\n`{name}`")
    assert getattr(algorithms, cls) is algorithms.Algorithm.registered[name]


def test_links_lead_somewhere() -> None:
    for name, text in [("README.md", INDEX), *PAGES.items()]:
        for target in re.findall(r"\]\(([^)]+)\)", text):
            path, _, anchor = target.partition("#")
            found = FOLDER / (path or name)
            assert found.exists(), f"{name}: {target}"
            if anchor:
                heads = {re.sub(r"[^\w-]", "", h.lower().replace(" ", "-"))
                         for h in re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)}  # fmt: skip
                assert anchor in heads or f'id="{anchor}"' in found.read_text(), f"{name}: {target}"


def options(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", text, re.MULTILINE))


@every_row
def test_options_are_those_of_the_constructor(name: str) -> None:
    page, _ = ROWS[name]
    assert options(PAGES[page]) == own(algorithms.Algorithm.registered[name])


def test_options_of_both_adams() -> None:
    """They stand together on one page, as `name=default`."""
    both = own(MomentumAllReduce)
    del both["freeze_step"], both["codec"]
    rows = re.findall(r"^\| (`\w+=.*?) \|", PAGES["qadam.md"], re.MULTILINE)
    assert dict(re.findall(r"`(\w+)=(.*?)`", " ".join(rows))) == both


def test_options_of_all() -> None:
    on_gradients, _, rest = INDEX.partition("## Parameters instead of gradients")
    on_parameters, _, local_steps = rest.partition("## Local steps")
    assert options(on_parameters) == {
        **own(RoundAlgorithm),
        **own(ModelAlgorithm),
    }
    assert options(local_steps) == own(OuterLoop)
    assert options(on_gradients) == {
        "optimizer": "None",
        **own(GradientAlgorithm),
        **own(Algorithm),
    }


@every_row_on_gradients
def test_index_says_what_the_codec_says(name: str) -> None:
    _, (cls, size, sent, bias, feedback, _, when) = ROWS[name]
    found = algorithms.Algorithm.registered[name]
    assert when
    if not issubclass(found, CompressedAllReduce):
        return

    def rank(communicator: Communicator) -> Algorithm:
        return found(copy.deepcopy(make_net()), communicator=communicator)

    (algorithm,) = run_ranks(1, rank)
    assert isinstance(algorithm, CompressedAllReduce)
    codec = algorithm.assignment.default.at(10**9)
    assert codec is not None
    assert size == f"{codec.payload_size(10**6) / 10**6:.3f}"
    gathered = name in ("topk", "dgc")
    assert sent == ("by the codec" if name == "compressed" else "b (P-1)" if gathered else "2 b (P-1)/P")
    biased = isinstance(codec.bias, Contractive)
    # TernGrad clips.
    assert bias == ("biased" if biased or name == "terngrad" else "unbiased")
    kept = biased if algorithm.feedback.workers is None else algorithm.feedback.workers
    assert feedback == ("yes" if kept else "no")


@every_row_on_gradients
def test_index_says_what_goes_with_which_optimizer(name: str) -> None:
    """Where the constructor warns of Adam, the table says SGD."""
    found = algorithms.Algorithm.registered[name]
    (algorithm,) = run_ranks(1, lambda communicator: found(copy.deepcopy(make_net()), communicator=communicator))
    goes_with = ROWS[name][1][5]
    if issubclass(found, MomentumAllReduce):
        assert goes_with == "its own Adam"
    elif name == "compressed":
        assert goes_with == "by the codec"
    else:
        expected = "SGD" if algorithm.holds_back else "any"
        assert goes_with.split()[0] == expected


@pytest.mark.figures
def test_figures_with_adam_are_those_measured() -> None:
    """The table of what goes with Adam has rows of bench/results/convergence.json."""
    text = INDEX.partition("## What goes with Adam")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \| ([+-]\d\.\d\d) \| ([\d,]+) \|", text, re.MULTILINE)
    measured = json.loads((FOLDER.parents[1] / "bench/results/convergence.json").read_text())["characters"]["rows"]
    found = {one["label"]: one for one in measured}
    assert len(rows) > 10
    for label, difference, sent in rows:
        assert f"{found[label]['loss_difference']:+.2f}" == difference, label
        assert f"{found[label]['bytes_per_step'] / 1000:,.0f}" == sent, label
    exact = found["all-reduce"]["loss"]
    assert f"{exact:.3f}" in text


@pytest.mark.figures
def test_figures_of_local_steps_are_those_measured() -> None:
    """The table of what local steps cost has the rows of the task text, whose bars are met."""
    text = INDEX.partition("## Local steps")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \| (\d\.\d\d\d) \| (\d+) \|", text, re.MULTILINE)
    measured = json.loads((FOLDER.parents[1] / "bench/results/convergence.json").read_text())["text"]["rows"]
    found = {one["label"]: (f"{one['loss']:.3f}", f"{one['bytes_per_step'] / 1000:.0f}") for one in measured}
    assert {label: (loss, sent) for label, loss, sent in rows} == found
    assert all(one["met"] for one in measured if one["label"] != "all-reduce")
