"""On a GPU: the contract over real NCCL, captures, and what a rank that stays away leads to.

The ranks share one GPU. NCCL refuses that within a host, so that each rank claims a host of its own (`NCCL_HOSTID`) and
they speak over the loopback interface.
"""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from bagua_kernels.comm import Communicator, ReduceOp, Work
from bagua_kernels.comm.backends.nccl import binding as nccl_binding
from bagua_kernels.comm.backends.nccl.communicator import NcclCommunicator
from bagua_kernels.comm.testing import run_processes
from bagua_kernels.errors import CommunicationError
from tests import limits

REASON = nccl_binding.unavailable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON)]

CPU = torch.device("cpu")


class Fetched(Work):
    """Work on copies, which writes them back to where the test looks."""

    def __init__(self, work: Work, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._work = work
        self._pairs = pairs

    def wait(self) -> None:
        self._work.wait()
        for tensor, copy in self._pairs:
            tensor.copy_(copy)
        self._pairs = []

    def is_completed(self) -> bool:
        return self._work.is_completed()


class Staged(Communicator):
    """Lets the contract, whose tensors are the CPU's, run on a communicator of GPUs."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank, self.size, self.timeout = inner.rank, inner.size, inner.timeout
        self.device = CPU
        self._seal = inner._seal

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        return self._inner.bytes_sent

    def _call(self, name: str, *args: object) -> Work:
        pairs = []

        def staged(value: object) -> object:
            if isinstance(value, dict):
                return {key: staged(each) for key, each in value.items()}
            if not isinstance(value, torch.Tensor):
                return value
            pairs.append((value, value.to(self._inner.device)))
            return pairs[-1][1]

        return Fetched(getattr(self._inner, name)(*map(staged, args)), pairs)

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()

    def _unusable(self) -> str:
        return self._inner._unusable()

    def _split(self, ranks: tuple[int, ...]) -> Communicator:
        return Staged(self._inner._split(ranks))

    def _broadcast(self, *args: object) -> Work:
        return self._call("_broadcast", *args)

    def _reduce(self, *args: object) -> Work:
        return self._call("_reduce", *args)

    def _all_reduce(self, *args: object) -> Work:
        return self._call("_all_reduce", *args)

    def _all_gather(self, *args: object) -> Work:
        return self._call("_all_gather", *args)

    def _reduce_scatter(self, *args: object) -> Work:
        return self._call("_reduce_scatter", *args)

    def _all_to_all(self, *args: object) -> Work:
        return self._call("_all_to_all", *args)

    def _gather(self, *args: object) -> Work:
        return self._call("_gather", *args)

    def _scatter(self, *args: object) -> Work:
        return self._call("_scatter", *args)

    def _send(self, *args: object) -> Work:
        return self._call("_send", *args)

    def _recv(self, *args: object) -> Work:
        return self._call("_recv", *args)

    def _neighbour_exchange(self, *args: object) -> Work:
        return self._call("_neighbour_exchange", *args)

    def _barrier(self) -> Work:
        return self._call("_barrier")


def connect(timeout: float = 60.0) -> NcclCommunicator:
    """Joins the other processes; runs before CUDA is used in this one."""
    os.environ["NCCL_HOSTID"] = f"host-of-rank-{os.environ['RANK']}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=limits.seconds(60)))
    return NcclCommunicator(timeout=timeout)


def contract() -> None:
    from tests.comm.contract import CASES

    communicator = connect()
    staged, failures = Staged(communicator), {}
    for case in CASES:
        try:
            case(staged)
        except BaseException:
            failures[case.__name__] = traceback.format_exc()
            break  # the ranks no longer agree on what comes next
    print("FAILURES", json.dumps(failures), flush=True)
    communicator.abort() if failures else communicator.close()


def capturing() -> None:
    """A graph with a collective, a grouped exchange and an average; replayed while the watch is awake."""
    c = connect()
    left, right = (c.rank - 1) % c.size, (c.rank + 1) % c.size
    x, got = torch.ones(1000, device=c.device), torch.empty(1000, device=c.device)
    mean = torch.full((1000,), float(c.rank), device=c.device)

    def step() -> None:
        c.all_reduce(x).wait()
        c.neighbour_exchange({left: got}, {right: x}).wait()
        c.all_reduce(mean, ReduceOp.AVG).wait()

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    x.fill_(1.0)
    graph = torch.cuda.CUDAGraph()
    under_way = c.barrier()
    under_way.wait()
    with torch.cuda.graph(graph):
        step()
    for i in (1, 2, 3):
        graph.replay()
        torch.cuda.synchronize()
        assert (x == float(c.size) ** i).all()
        assert (got == float(c.size) ** i).all()
        assert (mean == (c.size - 1) / 2).all()
    del graph
    c.close()
    print("FINE", flush=True)


def overlapping() -> None:
    """Neither start nor wait blocks the host, and the current stream sees the result."""
    c = connect()
    big = torch.randn(4096, 4096, device=c.device)
    c.barrier().wait()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(20):
        big = torch.nn.functional.normalize(big @ big)
    total = torch.ones(1 << 20, device=c.device)
    c.all_reduce(total).wait()
    total += 1
    issued = time.perf_counter() - started
    torch.cuda.synchronize()
    finished = time.perf_counter() - started
    assert (total == c.size + 1).all()
    c.close()
    print("ISSUED", issued, "FINISHED", finished, flush=True)
    print("FINE", flush=True)


def staying_away() -> None:
    """Rank 1 comes to nothing after the first barrier; the others' operation is aborted at the timeout."""
    c = connect(timeout=3)
    c.all_reduce(torch.ones(1, device=c.device)).wait()
    torch.cuda.synchronize()
    if c.rank != 1:
        c.all_reduce(torch.ones(1000, device=c.device)).wait()
        # Only an abort lets the GPU come to an end.
        torch.cuda.synchronize()
        with pytest.raises(CommunicationError, match=r"all_reduce #1 .*rank 1\b"):
            c.barrier()
    else:
        time.sleep(12)
    c.abort()
    print("FINE", flush=True)


def aborting() -> None:
    """An abort from another thread ends what hangs on the GPU."""
    c = connect()
    pair = c.duplicate()
    # NCCL connects two ranks at their first message. Only `groupEnd`, on the host, waits for that.
    first = torch.ones(1000, device=c.device)
    (pair.recv(first, 1) if c.rank == 0 else pair.send(first, 0)).wait()
    torch.cuda.synchronize()
    c.barrier().wait()
    if c.rank == 0:
        threading.Timer(1.0, pair.abort).start()
        pair.recv(torch.ones(1000, device=c.device), 1).wait()
        torch.cuda.synchronize()
        with pytest.raises(CommunicationError, match="it was aborted"):
            pair.barrier()
    else:
        pair.abort()
    c.barrier().wait()
    c.close()
    print("FINE", flush=True)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_contract(size: int) -> None:
    for rank, result in enumerate(run_processes(contract, size, timeout=limits.seconds(110))):
        assert "FAILURES {}\n" in result.stdout, f"rank {rank}:\n{result.stdout}\n{result.stderr}"
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("program", [capturing, overlapping, staying_away, aborting], ids=lambda p: p.__name__)
def test_program(program: Callable[[], None]) -> None:
    for rank, result in enumerate(run_processes(program, 2, timeout=limits.seconds(100))):
        assert (result.returncode, result.stdout.endswith("FINE\n")) == (0, True), f"rank {rank}:\n{result.stderr}"
