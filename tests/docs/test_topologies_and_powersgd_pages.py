"""The code of docs/topologies.md, docs/powersgd.md and docs/ddp-hook.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bagua_kernels import comm
from bagua_kernels.comm import run_ranks
from tests.grids import folded

FOLDER = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (FOLDER / page).read_text(), re.MULTILINE | re.DOTALL)


@folded(page=["topologies.md", "powersgd.md"])
def test_blocks_run(page: str, monkeypatch: Any) -> None:
    found = [compile(block, page, "exec") for block in blocks(page)]
    assert found
    (alone,) = run_ranks(1, lambda communicator: communicator)
    monkeypatch.setattr(comm, "world", lambda: alone)
    names: dict[str, Any] = {"print": lambda *_: None}
    for code in found:
        exec(code, names)


def test_the_hooks_blocks_run() -> None:
    """On one rank; tests/algorithms/ddp/test_hook.py runs them on two."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = torch.nn.Linear(7, 5)
        names: dict[str, Any] = {"net": net}
        for block in blocks("ddp-hook.md"):
            exec(compile(block, "ddp-hook.md", "exec"), names)
            names["model"](torch.ones(2, 7)).square().mean().backward()
            assert net.weight.grad is not None
            assert bool(net.weight.grad.isfinite().all())
        assert names["state"]["steps"] == 0
    finally:
        comm.shutdown()
        dist.destroy_process_group()


def test_powersgd_averages_what_its_page_says() -> None:
    names: dict[str, Any] = {}
    exec(blocks("powersgd.md")[0], names)
    assert all(bool(gradient.isfinite().all()) for gradient in names["gradients"])
    assert isinstance(names["gradients"][0], torch.Tensor)
