"""Averages of pairs under random schedules: the sum is conserved, nobody waits in a circle, and runs end."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from bagua_kernels.comm import run_ranks
from tests.comm.backends.sockets.common import leaving_nothing
from tests.comm.mailbox import pairwise_runs
from tests.comm.mailbox.common import over_sockets, schedules
from tests.comm.mailbox.pairwise_runs import check, rank, scheduled
from tests.comm.mailbox.triggered_runs import PRIME, Model


@schedules(400)
def test_random_schedules(seeds: range) -> None:
    for seed in seeds:
        check(scheduled(seed)[1])


class Overwritten(Model):
    """Takes the mean of what was read and what has come for its model, as other programs do."""

    def read(self, out: Sequence[torch.Tensor]) -> tuple[int, bool]:
        found = super().read(out)
        self.copy = out[0].clone()
        return found

    def owe(self, difference: Sequence[torch.Tensor]) -> None:
        self.x = (self.copy + difference[0]) % PRIME


@pytest.mark.slow
def test_overwriting_the_model_loses_steps() -> None:
    lost = 0
    for seed in range(20):
        try:
            check(scheduled(seed, Overwritten)[1])
        except AssertionError as error:
            lost += "not conserved" in str(error)
    assert lost


@pytest.mark.parametrize("first", [pytest.param(k, marks=pytest.mark.slow if k else ()) for k in range(0, 50, 10)])
def test_over_sockets(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise_runs, "open_mailbox", over_sockets)
    for seed in range(first, first + 10):
        size = 2 + seed % 7
        with leaving_nothing():
            results = run_ranks(size, rank, seed, lambda seconds: time.sleep(seconds / 1000), lambda: None, Model)
        check(results)
