"""Files of other libraries: safetensors and torch's distributed checkpoints, with the module's own names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm import Communicator, run_ranks
from tests.doors.jobs import Net, digest, needs

SPECS = ["bytegrad", "powersgd:rank=2", "diloco:interval=2", "decentralized", "sgp", "wagma", "sparse_loco:interval=2"]


def trained(spec: str, c: Communicator) -> tuple[torch.nn.Module, torch.nn.Module]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = from_spec(spec, net, optimizer, communicator=c)
    for step in range(3):
        model(
            torch.randn(4, 12, generator=torch.Generator().manual_seed(step + 10 * c.rank))
        ).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.synchronize()
    return model, net


@needs("safetensors")
@pytest.mark.parametrize("spec", SPECS)
def test_safetensors(spec: str, tmp_path: Path) -> None:
    """`save_model` finds ordinary tensors while an algorithm has them in flat memory, and after `close()`."""
    from safetensors.torch import load_model, save_model

    def run(c: Communicator) -> None:
        model, net = trained(spec, c)
        for name in ("open", "closed"):
            file = tmp_path / f"{name}-{c.rank}.safetensors"
            save_model(net, str(file))
            other = Net(seed=5)
            load_model(other, str(file))
            assert digest(other) == digest(net), name
            if name == "open":
                model.close()

    run_ranks(2, run)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_distributed_checkpoints(spec: str, tmp_path: Path) -> None:
    """The names are those of the module, as `get_model_state_dict` makes them of DDP."""

    def run(c: Communicator) -> None:
        model, net = trained(spec, c)
        folder = tmp_path / str(c.rank)
        dcp.save({"model": net.state_dict()}, checkpoint_id=folder, no_dist=True)
        other = Net(seed=5)
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        other.load_state_dict(state["model"])
        assert digest(other) == digest(net)
        model.close()

    run_ranks(2, run)
