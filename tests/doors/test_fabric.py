"""Lightning's Fabric with the strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.doors.jobs import SPECS, Net, digest, job, left_behind, loss_of, needs, report, samples

pytestmark = [needs("lightning"), pytest.mark.processes]


def begin(kind: str, devices: int) -> tuple[Any, Any, Any, Any]:
    from lightning.fabric import Fabric

    from bagua_kernels.integrations.fabric import BaguaStrategy

    strategy: Any = "ddp"
    if kind != "ddp":
        spec, hook = SPECS[kind]
        # With a hook DDP stays, and has to look for what no loss uses.
        strategy = BaguaStrategy(spec, hook=hook, **({"find_unused_parameters": True} if hook else {}))
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    net = Net(fabric.global_rank)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(samples(), batch_size=16))
    return fabric, model, optimizer, loader


def train(fabric: Any, model: Any, optimizer: Any, loader: Any, first: int = 0, end: int = 24) -> None:
    """Micro-batches from `first` to `end`; two of them are a step."""
    batches = [batch for _ in range(3) for batch in loader]
    for number, (x, y) in enumerate(batches[first:end]):
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            fabric.backward(F.cross_entropy(model(x), y) / 2)
        if number % 2:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()


def bare(model: Any) -> torch.nn.Module:
    found = model.module
    inner: torch.nn.Module = getattr(found, "module", found)
    return inner


def runs(kind: str, folder: str) -> None:
    fabric, model, optimizer, loader = begin(kind, 2)
    net = bare(model)
    train(fabric, model, optimizer, loader, end=12)
    state = {"model": model, "optimizer": optimizer}
    file = Path(folder) / "state.ckpt"
    fabric.save(file, state)
    fabric.barrier()
    names = list(torch.load(file)["model"])
    train(fabric, model, optimizer, loader, first=12)
    own = digest(net)
    if kind != "ddp":
        with fabric.strategy.averaged():
            mean = digest(net)
        fabric.strategy.close()
        assert digest(net) == mean
    report([own, digest(net), names, loss_of(net), left_behind()])


def resumes(folder: str, kind: str, devices: int) -> None:
    fabric, model, optimizer, loader = begin(kind, devices)
    fabric.load(Path(folder) / "state.ckpt", {"model": model, "optimizer": optimizer})
    loaded = digest(bare(model))
    train(fabric, model, optimizer, loader, first=12)
    own = digest(bare(model))
    fabric.strategy.close()
    report([own, loaded])


def test_training_and_checkpoints(tmp_path: Path) -> None:
    """Accumulation, clipping, equal bits; what is saved in the middle of a round goes on bit for bit."""
    losses = {}
    for kind in ("ddp", *SPECS):
        folder = tmp_path / kind
        folder.mkdir()
        ended = [found[0] for found in job(runs, 2, kind, str(folder))]
        assert ended[0][1] == ended[1][1], kind
        assert ended[0][2] == list(Net().state_dict())
        assert ended[0][4] == ended[1][4] == [], kind
        losses[kind] = ended[0][3]
        if kind != "ddp":
            same = [found[0] for found in job(resumes, 2, str(folder), kind, 2)]
            assert [one[0] for one in same] == [one[0] for one in ended], kind
    more = [found[0] for found in job(resumes, 3, str(folder), kind, 3)]
    assert len({one[1] for one in more}) == 1
    assert all(loss < losses["ddp"] + 0.15 for loss in losses.values()), losses


def second_module() -> None:
    fabric, *_ = begin("bytegrad", 2)
    with pytest.raises(ValueError, match="has wrapped a module already"):
        fabric.setup(Net())
    fabric.strategy.close()
    report(left_behind())


def test_a_second_module_is_refused() -> None:
    """Until the first one is closed."""
    assert job(second_module, 2) == [[[]], [[]]]
