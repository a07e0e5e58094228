"""The first steps of `AsyncModelAverage` have the exact mean of gradients, with all that `GradientAllReduce` handles."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bagua_kernels import optim
from bagua_kernels.algorithms import Algorithm, AsyncModelAverage, GradientAllReduce
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import fill
from tests.grids import grid

STEPS = 6


class Net(nn.Module):
    """With an embedding, a part that no rank uses, one that only rank 0 uses, and a frozen part."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4, sparse=sparse)
        self.used, self.unused, self.sometimes, self.frozen = (nn.Linear(4, 4) for _ in range(4))
        fill(self)
        self.frozen.requires_grad_(False)

    def forward(self, words: torch.Tensor, first: bool) -> torch.Tensor:
        x = self.frozen(self.used(self.embedding(words)))
        return self.sometimes(x) if first else x


def optimizer_of(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    if kind == "sparse":
        return torch.optim.SGD(net.parameters(), lr=0.05)
    made = torch.optim.AdamW if kind == "torch" else optim.AdamW
    return made([p for p in net.parameters() if p.requires_grad], lr=0.05, weight_decay=0.1)


@grid(kind=["torch", "ours", "sparse"], loop=["plain", "accumulated", "no_sync", "overflow", "resumed"])
def test_bits_of_gradient_all_reduce(kind: str, loop: str) -> None:
    def rank(communicator: Communicator, asynchronous: bool) -> torch.Tensor:
        net = Net(kind == "sparse")
        optimizer = optimizer_of(kind, net)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=loop == "overflow")
        options: dict[str, Any] = {"scaler": scaler} if loop == "overflow" and kind != "ours" else {}

        def wrap() -> Algorithm:
            if asynchronous:
                return AsyncModelAverage(
                    net, optimizer, communicator=communicator, warmup_steps=100, interval_ms=1, **options
                )
            return GradientAllReduce(net, optimizer, communicator=communicator)

        def backward(step: int) -> None:
            generator = torch.Generator().manual_seed(10 * step + communicator.rank)
            words = torch.randint(0, 11, (5,), generator=generator)
            loss = model(words, communicator.rank == 0).square().mean()
            scaler.scale(
                loss * (float("inf") if loop == "overflow" and step == 2 and communicator.rank else 1)
            ).backward()

        model = wrap()
        for step in range(STEPS):
            optimizer.zero_grad()
            if loop == "no_sync":
                with model.no_sync():
                    backward(step + 100)
            elif loop == "accumulated":
                backward(step + 100)
            backward(step)
            scaler.step(optimizer)
            scaler.update()
            if loop == "resumed" and step == 2:
                state = model.algorithm_state_dict()
                model.close()
                model = wrap()
                model.load_algorithm_state_dict(state)
        values = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
        assert bool(values.isfinite().all())
        fresh = Net(False)
        assert torch.equal(net.unused.weight, fresh.unused.weight)
        assert torch.equal(net.frozen.weight, fresh.frozen.weight)
        model.close()
        return values

    expected, found = (run_ranks(2, rank, asynchronous, timeout=60) for asynchronous in (False, True))
    assert all(map(torch.equal, expected, found))


def test_averages_begin_when_it_is_over() -> None:
    def rank(communicator: Communicator) -> tuple[int, bool]:
        net = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = AsyncModelAverage(net, optimizer, communicator=communicator, warmup_steps=3, interval=1)
        hooks = []
        for step in range(6):
            optimizer.zero_grad()
            model(torch.full((1, 3), step + communicator.rank + 1.0)).square().mean().backward()
            hooks.append(bool(net.weight._post_accumulate_grad_hooks))  # type: ignore[attr-defined]
            optimizer.step()
        model.synchronize()
        rounds = model.stats().rounds
        assert rounds is not None
        model.close()
        assert hooks == [True] * 3 + [False] * 3
        return rounds, bool(net.weight.isfinite().all())

    assert all(rounds > 0 and finite for rounds, finite in run_ranks(2, rank, timeout=60))
