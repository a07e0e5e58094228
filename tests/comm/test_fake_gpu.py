"""`fake_gpu`: what CUDA's allocator and streams allow, and what they do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bagua_kernels.comm import Communicator
from tests.comm.backends.nccl.fake_cuda import MisuseError
from tests.comm.fake_gpu import FakeGpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


def passed_on(gpu: FakeGpu, after: Callable[[torch.Tensor, torch.cuda.Stream], None]) -> None:
    """A tensor is made on a side stream, read on the current one, and freed after a last call."""

    def rank(communicator: Communicator) -> None:
        side, event = torch.cuda.Stream(gpu.device), torch.cuda.Event()
        with torch.cuda.stream(side):
            x = torch.ones(3, device=gpu.device)
            event.record(side)
        torch.cuda.current_stream().wait_event(event)
        assert float((x[1:] * 2).sum()) == 4.0
        _ = x * 2
        after(x, side)
        del x, _
        with torch.cuda.stream(side):
            torch.empty(1, device=gpu.device)

    gpu.run_ranks(1, rank)


@pytest.mark.parametrize("strict", [True, False])
def test_a_tensor_of_another_stream_is_freed_too_early(gpu: FakeGpu, strict: bool) -> None:
    gpu.cuda.memory.strict = strict
    with pytest.raises(MisuseError, match=r"shape \(3,\) and float32 .* freed .* aten\.mul"):
        passed_on(gpu, lambda x, side: None)


def test_the_owner_may_wait_between_the_free_and_its_next_allocation(gpu: FakeGpu) -> None:
    def rank(communicator: Communicator) -> None:
        side = torch.cuda.Stream(gpu.device)
        with torch.cuda.stream(side):
            x = torch.ones(3, device=gpu.device)
        torch.cuda.current_stream().wait_stream(side)
        _ = x * 2
        del x
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.empty(1, device=gpu.device)

    gpu.run_ranks(1, rank)


@pytest.mark.parametrize("way", ["record_stream", "event", "host"])
def test_a_free_that_waits_for_the_other_stream(gpu: FakeGpu, way: str) -> None:
    gpu.cuda.memory.strict = True
    ways: dict[str, Callable[[torch.Tensor, torch.cuda.Stream], None]] = {
        "record_stream": lambda x, side: x[:1].record_stream(torch.cuda.current_stream()),
        "event": lambda x, side: side.wait_stream(torch.cuda.current_stream()),
        "host": lambda x, side: torch.cuda.current_stream().synchronize(),
    }
    passed_on(gpu, ways[way])


def test_record_stream_of_another_stream_does_not_help(gpu: FakeGpu) -> None:
    with pytest.raises(MisuseError, match="call record_stream"):
        passed_on(gpu, lambda x, side: x.record_stream(side))


@pytest.mark.parametrize("ordered", [True, False])
def test_two_streams_use_the_same_bytes_in_order(gpu: FakeGpu, ordered: bool) -> None:
    def rank(communicator: Communicator) -> None:
        x, side = torch.zeros(6), torch.cuda.Stream(gpu.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x[:3].add_(1)
        x[3:].add_(1)
        if ordered:
            torch.cuda.current_stream().wait_stream(side)
        assert x.sum() == 6
        x.record_stream(side)

    if ordered:
        gpu.run_ranks(1, rank)
    else:
        with pytest.raises(MisuseError, match="without an order"):
            gpu.run_ranks(1, rank)


@pytest.mark.parametrize("copies", [False, True])
def test_transport_orders_streams_and_no_hosts(gpu: FakeGpu, copies: bool) -> None:
    """A rank may free what it has sent, and reads what it receives only after `wait`."""

    def rank(communicator: Communicator) -> None:
        x = torch.full((4,), float(communicator.rank), device=gpu.device)
        work = communicator.all_reduce(x)
        if copies:
            _ = x.clone()
        work.wait()
        assert x.tolist() == [1.0] * 4

    if copies:
        with pytest.raises(MisuseError, match=r"_start on stream .* aten\.clone"):
            gpu.run_ranks(2, rank)
    else:
        gpu.run_ranks(2, rank)
