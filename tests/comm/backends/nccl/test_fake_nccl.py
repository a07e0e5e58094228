"""The stand-in for NCCL finds wrong uses, so that the communicator's tests mean something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.comm.backends.nccl.fake_cuda import MisuseError
from tests.comm.backends.nccl.fake_nccl import FakeNcclError, Gpu, World
from tests.grids import grid

CPU = torch.device("cpu")


def raw(size: int, fn: Callable[[Gpu, Any, Any], None]) -> None:
    """Runs a function on the stand-in alone: a GPU, a communicator and a stream a rank."""
    world = World(size)

    def run(rank: int) -> None:
        gpu = world.gpus[rank]
        gpu.set_device(CPU)
        made = gpu.NcclCommunicator(size, (99).to_bytes(128, "big"), rank)
        stream = gpu.Stream(CPU)
        fn(gpu, made, stream)
        event = gpu.Event()
        event.record(stream)
        gpu.current_stream().wait_event(event)

    world.run(run)


def arguments(gpu: Gpu, stream: Any, n: int = 4) -> tuple[torch.Tensor, int]:
    x = torch.ones(n)
    gpu.record_stream(x, stream)
    return x, x.data_ptr()


def wrong_counts(gpu: Gpu, made: Any, stream: Any) -> None:
    x, p = arguments(gpu, stream)
    made.allReduce(p, p, 4 - made.rank, 7, 0, stream.cuda_stream)


def wrong_order(gpu: Gpu, made: Any, stream: Any) -> None:
    x, p = arguments(gpu, stream)
    for name in ("allReduce", "broadcast")[:: 1 - 2 * made.rank]:
        getattr(made, name)(p, p, 4, 7, 0, stream.cuda_stream)


def wrong_root(gpu: Gpu, made: Any, stream: Any) -> None:
    x, p = arguments(gpu, stream)
    made.broadcast(p, p, 4, 7, made.rank, stream.cuda_stream)


def both_send_first(gpu: Gpu, made: Any, stream: Any) -> None:
    x, p = arguments(gpu, stream)
    made.send(p, 4, 7, 1 - made.rank, stream.cuda_stream)
    made.recv(p, 4, 7, 1 - made.rank, stream.cuda_stream)


def send_across_a_collective(gpu: Gpu, made: Any, stream: Any) -> None:
    x, p = arguments(gpu, stream)
    if made.rank == 0:
        made.send(p, 4, 7, 1, stream.cuda_stream)
    made.allReduce(p, p, 4, 7, 0, stream.cuda_stream)
    if made.rank == 1:
        made.recv(p, 4, 7, 0, stream.cuda_stream)


def wrong_message(gpu: Gpu, made: Any, stream: Any) -> None:
    x, p = arguments(gpu, stream)
    gpu.groupStart()
    made.send(p, 3, 7, 1 - made.rank, stream.cuda_stream)
    made.recv(p, 2, 7, 1 - made.rank, stream.cuda_stream)
    gpu.groupEnd()


def group_left_open(gpu: Gpu, made: Any, stream: Any) -> None:
    gpu.groupStart()


def group_not_opened(gpu: Gpu, made: Any, stream: Any) -> None:
    gpu.groupEnd()


def nested_groups(gpu: Gpu, made: Any, stream: Any) -> None:
    gpu.groupStart()
    gpu.groupStart()


def strange_memory(gpu: Gpu, made: Any, stream: Any) -> None:
    x, p = arguments(gpu, stream)
    made.allReduce(p, p, 5, 7, 0, stream.cuda_stream)


def after_destroy(gpu: Gpu, made: Any, stream: Any) -> None:
    made.destroy()
    wrong_counts(gpu, made, stream)


def destroy_too_early(gpu: Gpu, made: Any, stream: Any) -> None:
    x, p = arguments(gpu, stream)
    if made.rank == 0:
        made.allReduce(p, p, 4, 7, 0, stream.cuda_stream)
        made.destroy()


def query_in_capture(gpu: Gpu, made: Any, stream: Any) -> None:
    with gpu.capture():
        event = gpu.Event()
        event.record(gpu.current_stream())
        event.query()


def capture_not_joined(gpu: Gpu, made: Any, stream: Any) -> None:
    with gpu.capture():
        event = gpu.Event()
        event.record(gpu.current_stream())
        stream.wait_event(event)


MISUSES = {
    wrong_counts: "as collective 0",
    wrong_order: "as collective 0",
    wrong_root: "as collective 0",
    both_send_first: r"circle.*rank 0 in send, rank 1 in send",
    send_across_a_collective: r"circle.*rank 0 in send, rank 1 in allReduce",
    wrong_message: r"sends 3 .* receives 2",
    group_left_open: "within a group",
    group_not_opened: "groupEnd without groupStart",
    nested_groups: "groupStart within a group",
    strange_memory: "belong to no tensor",
    after_destroy: "has been destroyed",
    destroy_too_early: "under way",
    query_in_capture: "queried",
    capture_not_joined: "before its stream had waited",
}


@grid(misuse__told=[pytest.param(misuse, told, id=misuse.__name__) for misuse, told in MISUSES.items()])
def test_the_stand_in_finds(misuse: Callable[..., None], told: str) -> None:
    with pytest.raises(MisuseError, match=told):
        raw(2, misuse)


def test_the_stand_in_reports_errors_and_stalls_until_aborted() -> None:
    def fn(gpu: Gpu, made: Any, stream: Any) -> None:
        gpu.world.stalled.add("allReduce")
        x, p = arguments(gpu, stream)
        made.allReduce(p, p, 4, 7, 0, stream.cuda_stream)
        event = gpu.Event()
        event.record(stream)
        assert not event.query()
        gpu.async_error = 2
        with pytest.raises(FakeNcclError, match="NCCL_ERROR number 2"):
            made.check_async_error()
        made.abort()
        assert event.query()
        assert x.tolist() == [1.0] * 4

    raw(2, fn)
