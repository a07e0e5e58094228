"""Memory and order on streams: training has one stream, the courier another, and neither waits on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms.asynchronous.published_model import PublishedModel, StaleRule
from bagua_kernels.algorithms.models.flat_parameters import FlatParameters
from bagua_kernels.comm import Communicator, open_mailbox
from bagua_kernels.comm.mailbox.triggered import Execution
from tests.algorithms.asynchronous.common import ALL, made, train
from tests.comm.fake_gpu import FakeGpu

ON_GPUS = {name: make for name, make in ALL.items() if not name.startswith("pairs")}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu(monkeypatch)
    # A courier may allocate between any two steps of training.
    gpu.cuda.memory.strict = True
    return gpu


def received(gpu: FakeGpu, rule: StaleRule, fresh: bool, current: int = 1) -> None:
    """A courier reads and receives on its stream; training uses what it received, three times."""

    def rank(communicator: Communicator) -> None:
        flat = FlatParameters(dict(nn.Linear(7, 5).named_parameters()))
        model = PublishedModel(flat, open_mailbox(communicator), rule)
        model.end_write()
        courier = torch.cuda.Stream(gpu.device)
        with torch.cuda.stream(courier):
            read, mean = model.buffers(), model.buffers()
        for step in range(3):
            with torch.cuda.stream(courier):
                model.read(read)
                for own, other in zip(read, mean, strict=True):
                    torch.mul(own, 0.5, out=other)
                model.receive(Execution(step, (0, 1), step if fresh else -1, fresh), read, mean)
            model.bring_in()
            model.begin_write()
            flat.buckets[0].flat.mul_(0.9)
            model.end_write(step)

    gpu.run_ranks(1, rank, current)


RECEIVED: dict[str, tuple[StaleRule, bool]] = {
    "replacement": ("conservative", True),
    "debt": ("conservative", False),
    "mean of a group": ("paper", False),
}


@pytest.mark.parametrize("what", RECEIVED)
def test_the_courier_reuses_no_memory_that_training_reads(gpu: FakeGpu, what: str) -> None:
    received(gpu, *RECEIVED[what])


def test_events_are_of_the_device_of_the_parameters(gpu: FakeGpu) -> None:
    received(gpu, "conservative", True, current=0)


def test_parameters_that_a_courier_reads_may_be_dropped(gpu: FakeGpu) -> None:
    def rank(communicator: Communicator) -> None:
        model = PublishedModel(FlatParameters(dict(nn.Linear(7, 5).named_parameters())), open_mailbox(communicator))
        with torch.cuda.stream(torch.cuda.Stream(gpu.device)):
            model.read(model.buffers())
        del model

    gpu.run_ranks(1, rank)


@pytest.mark.parametrize("name", ON_GPUS)
def test_streams_of_an_algorithm_use_memory_in_order(gpu: FakeGpu, name: str) -> None:
    """The transport orders streams as NCCL does, and the host waits for no stream."""

    def rank(communicator: Communicator) -> None:
        _, optimizer, model = made(ON_GPUS[name], communicator)
        train(model, optimizer, communicator.rank, range(8))
        model.synchronize()
        train(model, optimizer, communicator.rank, range(8, 12))
        state: Any = model.algorithm_state_dict()
        model.load_algorithm_state_dict(state)
        train(model, optimizer, communicator.rank, range(12, 14))
        model.close()

    gpu.run_ranks(3, rank)
