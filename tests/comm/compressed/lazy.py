"""Ranks as threads whose messages are as late as they may be: inputs are read in `wait`, and outputs are junk until then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bagua_kernels.comm import ReduceOp
from bagua_kernels.comm.backends.local.communicator import LocalCommunicator
from bagua_kernels.comm.work import Pending, Work


class Late(Pending):
    """A message that begins when it is waited for."""

    def __init__(self, start: Callable[[], Work]) -> None:
        super().__init__()
        self._start = start

    def _complete(self) -> None:
        self._start().wait()

    def is_completed(self) -> bool:
        return self._done


def spoil(output: torch.Tensor, input: torch.Tensor) -> None:
    """Fills an output with junk, unless the input is a part of it."""
    if not output.data_ptr() <= input.data_ptr() < output.data_ptr() + output.nbytes:
        output.view(-1).view(torch.uint8).fill_(0xA5)


def make_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the local communicator start no message before it is waited for, which the contract of `Work` allows.

    Otherwise it copies inputs at once, and buffers that are used again too early would never show.
    """
    to_all, gather, reduce = (getattr(LocalCommunicator, f"_all_{name}") for name in ("to_all", "gather", "reduce"))

    def all_to_all(
        self: LocalCommunicator, output: torch.Tensor, input: torch.Tensor, outs: list[int], ins: list[int]
    ) -> Work:
        spoil(output, input)
        return Late(lambda: to_all(self, output, input, outs, ins))

    def all_gather(self: LocalCommunicator, output: torch.Tensor, input: torch.Tensor) -> Work:
        spoil(output, input)
        return Late(lambda: gather(self, output, input))

    def all_reduce(self: LocalCommunicator, tensor: torch.Tensor, op: ReduceOp) -> Work:
        return Late(lambda: reduce(self, tensor, op))

    monkeypatch.setattr(LocalCommunicator, "_all_to_all", all_to_all)
    monkeypatch.setattr(LocalCommunicator, "_all_gather", all_gather)
    monkeypatch.setattr(LocalCommunicator, "_all_reduce", all_reduce)
