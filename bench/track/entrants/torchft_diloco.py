"""torchft's DiLoCo over Gloo, with its lighthouse on rank 0, and with the outer steps that suit runs of this length."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore

from bench.track.loop import Loop

TITLE, PACKAGE = "torchft DiLoCo", "torchft"
INTERVAL = 30
_PORT = 29600


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
    """See `bench.track.measure`."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    lighthouse = None
    if loop.rank == 0:
        program = str(Path(sys.executable).parent / "torchft_lighthouse")
        words = [program, "--min_replicas", str(loop.size), "--bind", f"{loop.address(0)}:{_PORT}"]
        lighthouse = subprocess.Popen([*words, "--join_timeout_ms", "10000"])
    store = TCPStore(loop.address(loop.rank), 0, is_master=True, wait_for_workers=False)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.5, nesterov=True)
    limit = timedelta(seconds=60)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        min_replica_size=loop.size,
        use_async_quorum=False,
        load_state_dict=lambda state: None,
        state_dict=dict,
        replica_id=f"rank_{loop.rank}",
        store_addr=loop.address(loop.rank),
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{loop.address(0)}:{_PORT}",
        hostname=loop.address(loop.rank),
        timeout=limit,
        quorum_timeout=limit,
    )
    with DiLoCo(manager, [model], optimizer, outer, sync_every=INTERVAL, pin_memory=False, use_bucketization=True):
        loop.run(model, optimizer)
    loop.meet("trained")
    if lighthouse is not None:
        lighthouse.kill()
