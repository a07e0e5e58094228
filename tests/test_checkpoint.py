"""One call that saves a training run, and one that resumes it, for any number of ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bagua_kernels import checkpoint, comm
from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.data import LoadBalancingDistributedSampler
from tests.grids import grid

SPECS = [
    "allreduce",
    "bytegrad:block=64",
    "topk:ratio=0.25",
    "diloco:interval=4",
    "local_sgd:interval=4",
    "choco:codec=minmax_uint8",
]


def begin(spec: str, c: Communicator) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return (
        from_spec(spec, net, optimizer, communicator=c),
        optimizer,
        torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
    )


def train(parts: tuple[Any, Any, Any], c: Communicator, first: int, end: int) -> None:
    model, optimizer, schedule = parts
    for step in range(first, end):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + c.rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def found(parts: tuple[Any, Any, Any]) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in parts[0].module.parameters()])


@grid(cover=1, spec=SPECS)
def test_resumes_bit_for_bit(spec: str, tmp_path: Path) -> None:
    """In the middle of a round, too: after six steps."""

    def run(c: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        parts = begin(spec, c)
        train(parts, c, 0, 6)
        checkpoint.save(tmp_path, parts[0], parts[1], schedule=parts[2], epoch=3, name="first", rng=False)
        train(parts, c, 6, 10)
        ended = found(parts)
        parts[0].close()
        others = begin(spec, c)
        rest = checkpoint.load(tmp_path, others[0], others[1], schedule=others[2], rng=False)
        assert rest == {"epoch": 3, "name": "first"}
        train(others, c, 6, 10)
        resumed = found(others)
        others[0].close()
        return ended, resumed

    for ended, resumed in run_ranks(2, run):
        torch.testing.assert_close(resumed, ended, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:one rank alone exchanges nothing:RuntimeWarning")
@grid(cover=1, spec=SPECS, size=[1, 3])
def test_another_number_of_ranks_begins_alike(spec: str, size: int, tmp_path: Path) -> None:
    """With equal parameters on all; residuals have the same sum over ranks, divided by their number."""

    def saves(c: Communicator) -> torch.Tensor:
        parts = begin(spec, c)
        train(parts, c, 0, 6)
        checkpoint.save(tmp_path, parts[0], parts[1], schedule=parts[2], epoch=3)
        mine = found(parts)
        parts[0].close()
        return mine

    def loads(c: Communicator) -> torch.Tensor:
        parts = begin(spec, c)
        assert checkpoint.load(tmp_path, parts[0], parts[1], schedule=parts[2], rng=False)["epoch"] == 3
        mine = found(parts)
        train(parts, c, 6, 8)
        parts[0].close()
        return mine

    saved, loaded = run_ranks(2, saves), run_ranks(size, loads)
    mean = torch.stack(saved).double().mean(0)
    for one in loaded:
        torch.testing.assert_close(one.double(), mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one, loaded[0], rtol=0, atol=0)


def test_samplers_scalers_and_random_numbers(tmp_path: Path) -> None:
    """What a run has beside its model, on one rank."""

    def run(c: Communicator) -> None:
        model, optimizer, _ = begin("bytegrad", c)
        sampler = LoadBalancingDistributedSampler(range(12), complexity=lambda _: 1.0, num_replicas=1, rank=0)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(torch.ones(()))
        drawn = iter(sampler)
        first = [next(drawn) for _ in range(5)]
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        checkpoint.save(tmp_path, model, optimizer, sampler=sampler, scaler=scaler)
        numbers = random.random(), float(np.random.rand()), float(torch.rand(()))
        rest = list(drawn)
        other = LoadBalancingDistributedSampler(range(12), complexity=lambda _: 1.0, num_replicas=1, rank=0)
        another = torch.amp.GradScaler("cpu", init_scale=2.0)
        checkpoint.load(tmp_path, model, optimizer, sampler=other, scaler=another)
        assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == numbers
        assert another.get_scale() == 64.0
        assert list(other) == rest
        assert sorted(first + rest) == list(range(12))
        model.close()

    run_ranks(1, run)


def test_refusals(tmp_path: Path) -> None:
    """In one sentence each."""

    def run(c: Communicator) -> None:
        model, optimizer, _ = begin("bytegrad", c)
        with pytest.raises(ValueError, match="expected names of your own, got module"):
            checkpoint.save(tmp_path, model, optimizer, module=1)
        checkpoint.save(tmp_path, model, optimizer)
        with pytest.raises(KeyError, match="no state of 'sampler'"):
            checkpoint.load(tmp_path, model, optimizer, sampler=optimizer)
        with pytest.raises(ValueError, match="was saved with an algorithm, and the model is given without one"):
            checkpoint.load(tmp_path, model.module, optimizer)
        model.close()

    try:
        run_ranks(1, run)
    finally:
        # A module without a wrapper has joined the job.
        comm.shutdown()
