"""Gradients that are kept, and those to which backward adds, on a GPU that is not there: the bits of the same run on a CPU."""

from __future__ import annotations

import contextlib

import pytest
import torch

from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import Odd, batch
from tests.comm.fake_gpu import FakeGpu
from tests.grids import grid


@grid(cover=1, spec=["allreduce", "bytegrad", "dgc:ratio=0.1"], local=[False, True])
def test_results_beside_and_kept(spec: str, local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(communicator: Communicator) -> list[torch.Tensor]:
        module = Odd()
        algorithm = from_spec(spec, module, communicator=communicator, bucket_bytes=500)
        kept = []
        for step in range(3):
            module.zero_grad()
            for micro in range(3):
                with algorithm.no_sync() if local and micro == 1 else contextlib.nullcontext():
                    algorithm(batch(communicator.rank, 3 * step + micro)).square().mean().backward()
            kept += [p.grad for p in module.parameters() if p.grad is not None]
        return [gradient.clone() for gradient in kept]

    gpu = FakeGpu(monkeypatch)
    expected = run_ranks(2, rank)
    for ours, theirs in zip(gpu.run_ranks(2, rank), expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0.0, atol=0.0)
