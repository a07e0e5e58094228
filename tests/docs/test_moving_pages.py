"""What docs/moving says: the programs of other libraries are Python, those for this package train, and all names exist."""

from __future__ import annotations

import inspect
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from bagua_kernels import algorithms
from bagua_kernels.algorithms import Algorithm
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import fill

FOLDER = Path(__file__).parents[2] / "docs" / "moving"
INDEX = (FOLDER / "README.md").read_text()
PAGES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.md")) if path.name != "README.md"}
HEADS = ["## Before", "## After", "## Options", "## What differs"]
# Of the table of accepted names: the class, another library's name and the own one.
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \| (.*) \|$", re.MULTILINE)
CLASSES = {
    "deepspeed-onebit-adam": "OneBitAdam",
    "torch-post-local-sgd": "PostLocalSGD",
    "accelerate-local-sgd": "LocalSGD",
    "torchft-diloco": "DiLoCo",
    "bagua": "Decentralized",
    "horovod": "CompressedAllReduce",
}

every = pytest.mark.parametrize("page", list(PAGES))


def program(page: str, head: str) -> str:
    """The one program of a section."""
    section = PAGES[page].partition(f"\n## {head}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return str(code)


def make_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 5))
    fill(net)
    return net


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(8, 24, generator=generator), torch.arange(8) % 5) for _ in range(4)]


@every
def test_program_before_is_python(page: str) -> None:
    code = compile(program(page, "Before"), page, "exec")
    assert {"net", "loader"} <= set(code.co_names)


@every
def test_program_after_trains_on_two_ranks(page: str, ranks: threading.local) -> None:
    code = compile(program(page, "After"), page, "exec")

    def rank(communicator: Communicator) -> list[torch.Tensor]:
        ranks.communicator = communicator
        given: dict[str, Any] = {"net": make_net(), "loader": batches(communicator.rank)}
        exec(code, given)
        model = given["model"]
        assert type(model).__name__ == CLASSES[page]
        assert model.stats().steps == 4
        assert model.stats().bytes_sent > 0
        found = [p.detach().clone() for p in model.parameters()]
        model.close()
        return found

    first, second = run_ranks(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, make_net().parameters(), strict=True))


@every
def test_pages_are_short_and_alike(page: str) -> None:
    lines = PAGES[page].splitlines()
    assert len(lines) <= 110
    assert [line for line in lines if line.startswith("## ")] == HEADS
    assert f"({page}.md)" in INDEX


def test_every_page_has_a_class() -> None:
    assert set(CLASSES) == set(PAGES)


def test_table_has_all_accepted_names() -> None:
    kinds = [kind for kind in Algorithm.registered.values() if kind.__module__.startswith("bagua_kernels.")]
    declared = {(kind.__name__, other, own) for kind in kinds for other, own in vars(kind).get("synonyms", {}).items()}
    assert {row[:3] for row in ROW.findall(INDEX)} == declared


def test_names_of_pytorch_are_those_of_its_signatures() -> None:
    known = {kind.__name__: inspect.signature(kind).parameters
             for kind in (PeriodicModelAverager, PostLocalSGDState, PowerSGDState)}  # fmt: skip
    seen = 0
    for _, other, _, user in ROW.findall(INDEX):
        if match := re.match(r"PyTorch's `(\w+)`", user):
            assert other in known[match[1]]
            seen += 1
    assert seen == 7


@every
def test_a_page_has_the_accepted_names_of_its_classes(page: str) -> None:
    """A name that a page declares accepted is one, of a class that the page links or names."""
    rows = [line for line in PAGES[page].splitlines() if line.startswith("|") and "is accepted" in line]
    named = {name for name in re.findall(r"\w+", PAGES[page]) if isinstance(getattr(algorithms, name, None), type)}
    listed = {(other, own) for kind, other, own, _ in ROW.findall(INDEX) if kind in named}
    for row in rows:
        own = re.findall(r"^\|[^|]*\| `(\w+)`", row)[0]
        (other,) = re.findall(r"`(\w+)` is accepted", row)
        assert (other, own) in listed, row


@pytest.mark.parametrize("page", ["README", *PAGES])
def test_links_lead_somewhere(page: str) -> None:
    text = INDEX if page == "README" else PAGES[page]
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        assert (FOLDER / path).is_file(), target
        if anchor:
            assert f'<a id="{anchor}"></a>' in (FOLDER / path).read_text(), target
