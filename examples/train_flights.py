"""Trains tables of embeddings and a perceptron to predict late flights, with gradients of tables that are sparse or dense.

    python examples/train_flights.py                                       one process
    torchrun --nproc-per-node 2 examples/train_flights.py                  two; each step sends the rows that it used
    torchrun --nproc-per-node 2 examples/train_flights.py --dense          all rows are sent, 8 bits each

What concerns this project is marked with an arrow. The flights are in flight_data.py.
"""

import argparse
import contextlib

import flight_data
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

from bagua_kernels import comm
from bagua_kernels.algorithms import ModelAlgorithm, from_spec


class Net(nn.Module):
    """A table for each column, and a perceptron; the tables are nearly all of its parameters."""

    def __init__(self, rows: list[int], sparse: bool, width: int = 32) -> None:
        super().__init__()
        tables = [nn.Embedding(count, width, sparse=sparse) for count in rows]
        for table in tables:
            nn.init.normal_(table.weight, std=0.05)
        self.tables = nn.ModuleList(tables)
        inputs = len(rows) * width + flight_data.DENSE
        self.perceptron = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        found = [table(numbers[:, place]) for place, table in enumerate(self.tables)]
        logits: torch.Tensor = self.perceptron(torch.cat([*found, dense], dim=1)).squeeze(1)
        return logits


def main() -> None:
    """Reads the command line, trains, and prints the loss over flights that were held back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="bytegrad")
    parser.add_argument("--dense", action="store_true", help="gradients of tables are dense")
    parser.add_argument("--batch", type=int, default=256, help="flights per rank and step")
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()
    comm.init()  # <- under torchrun, or alone
    flights = flight_data.load()
    torch.manual_seed(0)
    training, testing = random_split(TensorDataset(flights.numbers, flights.dense, flights.late), [0.9, 0.1])
    net = Net((flights.numbers.max(0).values + 1).tolist(), not options.dense).to(comm.device())
    # Adagrad takes sparse gradients, and steps by them as by dense ones: rows without a gradient stay as they are.
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.05)
    model = from_spec(options.algorithm, net, optimizer)  # <- instead of DistributedDataParallel(...)
    sampler: DistributedSampler[object] = DistributedSampler(training, comm.size(), comm.rank())
    loader = DataLoader(training, options.batch, sampler=sampler)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for numbers, dense, late in loader:
            logits = model(numbers.to(comm.device()), dense.to(comm.device()))
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(logits, late.to(comm.device())).backward()
            optimizer.step()
    stats = model.stats()
    # Of an algorithm on parameters each rank has its own: their mean is evaluated.
    with model.averaged() if isinstance(model, ModelAlgorithm) else contextlib.nullcontext(), torch.no_grad():
        numbers, dense, late = (part.to(comm.device()) for part in testing[:])
        loss = F.binary_cross_entropy_with_logits(net(numbers, dense), late)
    if comm.rank() == 0:
        print(
            f"log loss {loss.item():.4f} of {len(testing)} flights, {stats.bytes_sent / stats.steps / 1000:.1f} kB per step"
        )
    model.close()
    comm.shutdown()  # <-


if __name__ == "__main__":
    main()
