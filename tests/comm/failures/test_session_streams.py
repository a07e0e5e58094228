"""Work that several streams of one GPU wait for."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels.comm import Communicator
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.failures.session_work import SessionWork
from tests.comm.fake_gpu import FakeGpu


class Handle:
    """Torch's work of an operation that has ended."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


def doubled(x: torch.Tensor) -> None:
    x.mul_(2)


@pytest.mark.parametrize("current", [0, 1])
def test_a_second_stream_sees_what_finish_wrote_on_the_first(monkeypatch: pytest.MonkeyPatch, current: int) -> None:
    """The streams are those of the tensors' device, whatever the current device is."""
    gpu = FakeGpu(monkeypatch)

    def rank(communicator: Communicator) -> None:
        x, second = torch.ones(3), torch.cuda.Stream(gpu.device)
        second.wait_stream(torch.cuda.current_stream(gpu.device))
        session = Session("world", 2.0, 0, (0,), None)
        work = SessionWork(session, Handle(), "reduce", None, None, lambda: doubled(x), gpu.device)
        work.wait()
        with torch.cuda.stream(second):
            work.wait()
            assert x.tolist() == [2.0] * 3
        x.record_stream(second)

    gpu.run_ranks(1, rank, current)
