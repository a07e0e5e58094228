"""Trains a small network on images with several processes, once with each algorithm, and compares them.

    python examples/train_images.py                             two processes, or one for each GPU
    torchrun --nproc-per-node 2 examples/train_images.py        the same under a launcher of one's own

What concerns this project is marked with an arrow; the rest is an ordinary training loop. The data sets are in
image_data.py; the progress bar, the table and the picture are in report.py.
"""

import argparse
import contextlib
from pathlib import Path

import image_data
import report
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from bagua_kernels import comm
from bagua_kernels.algorithms import ModelAlgorithm, OneBitAdam, QAdam, from_spec


class Net(nn.Module):
    """Two convolutions and two linear layers with 207 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(1, 16, 3, padding=1)
        self.convolution2 = nn.Conv2d(16, 32, 3, padding=1)
        self.linear1 = nn.Linear(32 * 7 * 7, 128)
        self.linear2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.convolution1(x)), 2)
        x = F.max_pool2d(F.relu(self.convolution2(x)), 2)
        return self.linear2(F.relu(self.linear1(x.flatten(1))))


def accuracy(model: nn.Module, test: TensorDataset, communicator: comm.Communicator) -> float:
    """Returns the share of test images that are recognised; each rank looks at its part, all return the same number."""
    mine = Subset(test, range(comm.rank(), len(test), comm.size()))
    correct = torch.zeros(1, device=comm.device())
    model.eval()
    with torch.no_grad():
        for images, labels in DataLoader(mine, batch_size=500):
            correct += (model(images.to(comm.device())).argmax(dim=1) == labels.to(comm.device())).sum()
    model.train()
    communicator.all_reduce(correct).wait()
    return correct.item() / len(test)


def train(algorithm: str, options: argparse.Namespace, communicator: comm.Communicator) -> report.Run:
    """Trains one network from the same start as any other, and returns what was measured on the way."""
    train_set, test_set = image_data.load(options.dataset, options.data)
    torch.manual_seed(0)
    net = Net().to(comm.device())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters())
    own_adam = algorithm.startswith(("qadam", "onebit_adam"))
    model = from_spec(algorithm, net, None if own_adam else optimizer)  # <- instead of DistributedDataParallel(...)
    if isinstance(model, QAdam | OneBitAdam):
        optimizer = model.optimizer
    sampler = DistributedSampler(train_set, comm.size(), comm.rank())
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    steps = options.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    with report.Run(algorithm, model, steps, comm.rank(), comm.size()) as run:
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                loss = F.cross_entropy(model(images.to(comm.device())), labels.to(comm.device()))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                run.step(loss.item(), len(images), model.stats())
            # Of an algorithm on parameters each rank has its own: their mean is evaluated.
            with model.averaged() if isinstance(model, ModelAlgorithm) else contextlib.nullcontext():
                run.evaluation(accuracy(model.module, test_set, communicator))
    return run


def main() -> None:
    """Reads the command line, starts the processes if that is left to do, trains and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", nargs="+", default=["allreduce", "bytegrad"], help="one or several, in turn")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--nproc", type=int, default=torch.cuda.device_count() or 2, help="ignored under torchrun")
    parser.add_argument("--dataset", choices=image_data.NAMES, default="mnist")
    parser.add_argument("--data", type=Path, help="folder or file to read instead of the installed data set")
    parser.add_argument("--output", type=Path, default=Path("results"))
    options = parser.parse_args()
    try:
        image_data.locate(options.dataset, options.data)
    except image_data.DatasetError as error:
        parser.error(str(error))
    report.under_torchrun(options.nproc)
    communicator = comm.init()  # <- reads torchrun's environment: NCCL for GPUs, Gloo for CPUs
    runs = [train(algorithm, options, communicator) for algorithm in options.algorithm]
    if comm.rank() == 0:
        report.write(runs, options.output, vars(options))
    comm.shutdown()  # <-


if __name__ == "__main__":
    main()
