"""Trains a small network to the end although workers are killed: torchrun restarts all, and they go on from a checkpoint.

    torchrun --standalone --nproc-per-node 4 --max-restarts 10 examples/elastic_restart.py --folder run
    kill -9 ...                                              any worker, at any moment, also in the middle of a save
    torchrun --standalone --nproc-per-node 3 ...             goes on with three workers from the same folder

Each rank prints the samples of its steps. What concerns checkpoints is marked with an arrow.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from bagua_kernels import checkpoint, comm
from bagua_kernels.algorithms import from_spec
from bagua_kernels.data import LoadBalancingDistributedSampler

SAMPLES = 3072  # 3 and 4 ranks divide them without a rest
BATCH = 8  # samples per rank and step


def main() -> None:
    """Trains from the newest checkpoint, if there is one, to the last epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="bytegrad", help="and options, such as onebit:min_numel=0,exact=none")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="of the checkpoint; all hosts share it")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    options = parser.parse_args()
    comm.init()
    torch.manual_seed(0)
    x, centres = torch.randn(SAMPLES, 16), torch.randn(4, 16)
    y = torch.cdist(x, centres).argmin(1)
    data = TensorDataset(torch.arange(SAMPLES), x, y)
    net = torch.nn.Sequential(torch.nn.Linear(16, 128), torch.nn.Tanh(), torch.nn.Linear(128, 4)).to(comm.device())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    model = from_spec(options.algorithm, net, optimizer)
    sampler = LoadBalancingDistributedSampler(data, complexity=[1.0] * SAMPLES)
    loader = DataLoader(data, BATCH, sampler=sampler)  # workers would draw ahead: see docs/loading.md
    if (options.folder / "checkpoint.json").exists():  # <- it is there once all ranks have written their parts
        checkpoint.load(options.folder, model, optimizer, sampler=sampler)  # <- also of another number of ranks
    print(f"begins after step {model.stats().steps}, rank {comm.rank()} of {comm.size()}", flush=True)
    for epoch in range(sampler.epoch, options.epochs):  # <- the epoch that was interrupted, and those after it
        sampler.set_epoch(epoch)
        for rows, inputs, targets in loader:  # <- what is left of the epoch
            loss = F.cross_entropy(model(inputs.to(comm.device())), targets.to(comm.device()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step = model.stats().steps
            given = " ".join(map(str, rows.tolist()))
            print(f"epoch {epoch}, step {step}, rank {comm.rank()} of {comm.size()}, samples {given}", flush=True)
            if step % options.every == 0:  # <- the former checkpoint counts until all ranks have written the new one
                checkpoint.save(options.folder, model, optimizer, sampler=sampler)
    checkpoint.save(options.folder, model, optimizer, sampler=sampler)  # <- a restart has nothing left to do
    with torch.no_grad():
        loss = F.cross_entropy(net(x.to(comm.device())), y.to(comm.device()))
    if comm.rank() == 0:
        print(f"final loss {loss.item():.6f}, {SAMPLES} samples", flush=True)
    model.close()
    comm.shutdown()


if __name__ == "__main__":
    main()
