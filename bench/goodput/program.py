"""What one process of each entrant does; a script that needs PyTorch and what the entrant needs, and no more.

python program.py WAY SPEC [ADDRESS]
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

STEP_SECONDS = 0.05  # of computation, for which a pause stands: the ranks share two cores
SAVE_SECONDS = 10.0  # between two checkpoints


def loop(net: torch.nn.Module, model: torch.nn.Module, optimizer: Any, steps: Callable[[], int], seed: int) -> None:
    """Trains until the process is killed; prints when each step was finished, and its number."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(16, 64, generator=generator)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        time.sleep(STEP_SECONDS)
        optimizer.step()
        # One write: processes of torchrun have one output.
        sys.stdout.write(f"STEP {time.time()} {steps()}\n")
        sys.stdout.flush()


def ours(net: torch.nn.Module, optimizer: torch.optim.Optimizer, spec: str, doors: str) -> None:
    """Ranks that heal; with the addresses of others a new one."""
    from bagua_kernels import comm
    from bagua_kernels.algorithms import from_spec

    members = comm.init(elastic=True, join=doors or None).members
    model = from_spec(spec, net, optimizer, on_failure="heal")
    loop(net, model, optimizer, lambda: model.stats().steps, members.name)


def torchft(net: torch.nn.Module, optimizer: torch.optim.Optimizer, lighthouse: str) -> None:
    """A replica of torchft's own data parallelism, as its example has it."""
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica_{os.getpid()}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=timedelta(seconds=10),
        hostname="127.0.0.1",
    )
    loop(net, DistributedDataParallel(manager, net), Optimizer(manager, optimizer), manager.current_step, os.getpid())


def torchrun(net: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """DDP, with a checkpoint now and then, from which all ranks begin after torchrun has started them again."""
    import torch.distributed as dist

    # Under a prefix of their own, or ranks that were started again would find addresses of those before (PyTorch 2.13).
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], agent)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    model = torch.nn.parallel.DistributedDataParallel(net)
    path, done, saved = Path(folder, "checkpoint.pt"), 0, time.monotonic()
    if path.exists():
        state = torch.load(path)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]

    def steps() -> int:
        nonlocal done, saved
        done += 1
        if rank == 0 and time.monotonic() > saved + SAVE_SECONDS:
            saved = time.monotonic()
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "done": done}, f"{path}.new")
            Path(f"{path}.new").replace(path)
        return done

    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    loop(net, model, optimizer, steps, rank)


def run(way: str, spec: str, address: str = "") -> None:
    """Trains in one of the ways; called in a process of its own."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [
        torch.nn.Linear(64, 512),
        torch.nn.Tanh(),
        torch.nn.Linear(512, 512),
        torch.nn.Tanh(),
        torch.nn.Linear(512, 8),
    ]
    net = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    if way == "ours":
        ours(net, optimizer, spec, address)
    elif way == "torchft":
        torchft(net, optimizer, address)
    else:
        torchrun(net, optimizer, address)


if __name__ == "__main__":
    run(*sys.argv[1:])
