"""Thread ranks on a GPU: what one thread writes on its stream is there when another thread reads it. On a stand-in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bagua_kernels.comm import ReduceOp, Schedule, run_ranks
from bagua_kernels.comm.backends.local import communicator as local_communicator
from bagua_kernels.comm.backends.local.mailbox import LocalMailbox

GPU = torch.device("cuda", 1)
POISON = 7.0


class Streams:
    """The current streams of all threads, on which copies and sums run only when the host waits for the stream.

    Attributes:
        devices: the devices that anything was asked for.
        unfinished: streams whose work nobody waited for.
    """

    def __init__(self) -> None:
        self.threads = threading.local()
        self.devices: set[torch.device] = set()
        self.unfinished: list[Stream] = []

    def current_stream(self, device: torch.device | None = None) -> Stream:
        self.devices.add(device)
        return self.stack()[-1]

    def stack(self) -> list[Stream]:
        if not hasattr(self.threads, "stack"):
            self.threads.stack = [Stream(self)]
        return self.threads.stack


class Stream:
    """Work that has not run; a context in which it is the current stream."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def put(self, target: torch.Tensor, value: torch.Tensor) -> None:
        self.pending.append((target, value))

    def synchronize(self) -> None:
        for target, value in self.pending:
            COPY(target, value)
        self.pending = []

    def __enter__(self) -> None:
        self.streams.stack().append(self)

    def __exit__(self, *_: object) -> None:
        assert self.streams.stack().pop() is self
        if self.pending:
            self.streams.unfinished.append(self)


CLONE, COPY = torch.Tensor.clone, torch.Tensor.copy_


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    made = Streams()

    def late(value: torch.Tensor) -> torch.Tensor:
        target = torch.full_like(value, POISON)
        made.stack()[-1].put(target, value)
        return target

    def copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        made.stack()[-1].put(target, CLONE(source))
        return target

    # Tensors of the CPU pass for the GPU's.
    monkeypatch.setattr(torch.Tensor, "device", property(lambda tensor: GPU))
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: late(CLONE(tensor)))
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(local_communicator, "reduce_in_order", lambda parts, op: late(summed(parts)))
    monkeypatch.setattr(torch.cuda, "current_stream", made.current_stream)
    monkeypatch.setattr(torch.cuda, "set_device", made.devices.add)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(made))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    yield made
    assert made.devices == {GPU}
    assert made.unfinished == []


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    total = CLONE(parts[0])
    for part in parts[1:]:
        total += part
    return total


def values(rank: int) -> torch.Tensor:
    return torch.tensor([1.0, 10.0, 100.0, 1000.0]) * (rank + 1)


def collectives(c: Any) -> dict[str, list[float]]:
    """Several operations, each of which reads what other ranks brought."""
    right, left = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    x = {name: values(c.rank) for name in ("all_reduce", "broadcast")}
    c.all_reduce(x["all_reduce"], ReduceOp.SUM).wait()
    c.broadcast(x["broadcast"], 1).wait()
    x["all_to_all"], x["recv"] = torch.zeros(4), torch.zeros(4)
    c.all_to_all(x["all_to_all"], values(c.rank)).wait()
    c.send(values(c.rank), right)
    c.recv(x["recv"], left).wait()
    return {name: tensor.tolist() for name, tensor in x.items()}


def check(results: list[dict[str, list[float]]]) -> None:
    size = len(results)
    for rank, result in enumerate(results):
        assert result["all_reduce"] == summed([values(r) for r in range(size)]).tolist()
        assert result["broadcast"] == values(1).tolist()
        assert result["all_to_all"] == torch.cat([values(r).chunk(size)[rank] for r in range(size)]).tolist()
        assert result["recv"] == values((rank - 1) % size).tolist()


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_on_a_gpu(streams: Streams, size: int) -> None:
    check(run_ranks(size, collectives, device=GPU))


def test_collectives_on_a_gpu_under_a_schedule(streams: Streams) -> None:
    for seed in range(5):
        check(run_ranks(2, collectives, device="cuda:1", schedule=Schedule(seed)))


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_collectives_on_a_cpu_ask_for_no_stream(
    monkeypatch: pytest.MonkeyPatch, device: torch.device | str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", None)
    monkeypatch.setattr(torch.cuda, "set_device", None)
    check(run_ranks(2, collectives, device=device))


def letters(c: Any) -> list[list[float]]:
    box, other, seen = LocalMailbox(c), 1 - c.rank, []
    for number in range(3):
        mine, got = torch.zeros(4), torch.zeros(4)
        # On the stream, as everything else: the receiver must not see the zeros.
        mine.copy_(values(c.rank) + number)
        box.exchange({other: got}, {other: mine}, number).wait()
        # The sender may use its memory again, though the receiver may not have waited yet.
        mine.fill_(POISON)
        seen.append(got.tolist())
    c.barrier().wait()
    return seen


def test_mailbox_on_a_gpu(streams: Streams) -> None:
    for seed in range(10):
        for rank, seen in enumerate(run_ranks(2, letters, device=GPU, schedule=Schedule(seed))):
            assert seen == [(values(1 - rank) + number).tolist() for number in range(3)]


def test_device_without_a_number_is_the_current_one(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert run_ranks(2, lambda c: c.device, device="cuda") == [GPU, GPU]


def test_backward_passes_run_on_the_ranks_threads(streams: Streams) -> None:
    """On a GPU PyTorch runs them all on one thread, where the hooks of ranks would wait for each other."""
    assert run_ranks(2, lambda c: torch._C._is_multithreading_enabled(), device=GPU) == [False, False]
    assert torch._C._is_multithreading_enabled()


def test_arguments_and_results_are_there(streams: Streams) -> None:
    """The caller has a stream of its own, too."""
    x = torch.zeros(4)
    x.copy_(values(0))

    def fn(c: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(4)
        y.copy_(x)
        return y

    assert [y.tolist() for y in run_ranks(2, fn, x, device=GPU)] == [values(0).tolist()] * 2
