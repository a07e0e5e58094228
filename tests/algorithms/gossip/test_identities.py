"""What algorithms are under special conditions: one rank, a complete graph, no loss, no difference between ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.topology import Complete, GivenMatrix, Ring
from tests.algorithms.gossip.common import ALL, CASES, Case, Quadratic, Task, error, falling, flat, simulated, trained
from tests.algorithms.ranks import Odd, batch
from tests.grids import grid


@grid(case=ALL, momentum=[0.0, 0.9])
def test_one_rank_is_plain_pytorch_bit_for_bit(case: Case, momentum: float) -> None:
    peers = GivenMatrix(1, [[1.0]])

    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], int]:
        module = Odd()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum)
        model = case.make(module, optimizer, communicator, peers=peers)
        hooks = len(optimizer._optimizer_step_post_hooks) + len(optimizer._optimizer_step_pre_hooks)
        hooks += len(module._forward_pre_hooks)
        for step in range(5):
            optimizer.zero_grad()
            model(batch(0, step)).square().mean().backward()
            optimizer.step()
        model.synchronize()
        assert model.consensus() == 0
        assert model.stats().bytes_sent == 0
        with model.averaged():
            pass
        return [p.detach().clone() for p in module.parameters()], hooks

    ((ours, hooks),) = run_ranks(1, rank)
    assert hooks == 1  # which counts steps
    plain = Odd()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=momentum)
    for step in range(5):
        optimizer.zero_grad()
        plain(batch(0, step)).square().mean().backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, plain.parameters(), strict=True))


@grid(cover=1, size=[2, 3, 4, 7])
def test_complete_graphs_average_models(size: int) -> None:
    """D-PSGD with all ranks as peers: the mean of all models, then each rank's own step."""
    module = Quadratic()
    task, x = Task(flat(module).numel()), np.tile(flat(module).double().numpy(), (size, 1))
    expected = [x]
    for step in range(20):
        own = np.stack([task.gradient(rank, step, x[rank]) for rank in range(size)])
        x = x.mean(axis=0) - falling(step) * own
        expected.append(x)
    assert error(trained(CASES["decentralized"], size, peers="all"), np.stack(expected)) <= 1e-6


def test_complete_graphs_follow_averaged_gradients() -> None:
    """The mean of the models takes the steps of the mean gradient, as with an all-reduce."""
    found = trained(CASES["decentralized"], 4, peers="all")
    module = Quadratic()
    task, mean = Task(flat(module).numel()), flat(module).double().numpy()
    for step in range(20):
        mean = mean - falling(step) * np.mean([task.gradient(r, step, found[step, r]) for r in range(4)], axis=0)
        assert np.abs(found[step + 1].mean(axis=0) - mean).max() <= 1e-6 * np.abs(mean).max()


@grid(cover=1, size=[3, 4])
def test_codecs_without_loss_send_differences_exactly(size: int) -> None:
    """DCD is then D-PSGD, and Choco that mixes after the step if eta is 1."""
    w = Ring(size).matrix()
    combine, adapt = simulated(CASES["decentralized"], Ring(size)), simulated(CASES["push"], Ring(size))
    assert np.abs(combine - adapt).max() > 1e-3
    assert np.allclose(w, w.T)
    assert error(trained(CASES["low_precision"], size), combine) <= 1e-6
    # The running sum is rounded once more in each step.
    assert error(trained(CASES["choco"], size, eta=1.0), adapt) <= 2e-6


@grid(cover=1, size=[2, 3, 5, 8])
def test_push_sum_on_a_doubly_stochastic_graph_sends_no_weight(size: int) -> None:
    """Weights stay at 1, so that each element takes four bytes and nothing is added."""

    def rank(communicator: Communicator) -> int:
        module = Quadratic({"p": (1024,)})
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = CASES["push"].make(module, optimizer, communicator)
        task = Task(1024)
        for step in range(4):
            optimizer.zero_grad()
            task.loss(model, communicator.rank, step).backward()
            optimizer.step()
        model.wait()
        sent = model.stats().bytes_sent
        model.close()
        return sent

    assert run_ranks(size, rank) == [4 * 4 * 1024] * size


@pytest.mark.parametrize("name", ["decentralized", "low_precision", "choco", "d2", "push"])
def test_equal_ranks_stay_equal(name: str) -> None:
    """Ranks with the same examples train as one: nothing is left to mix but rounding."""

    def rank(communicator: Communicator) -> torch.Tensor:
        module = Quadratic()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = CASES[name].make(module, optimizer, communicator, peers=Complete(4))
        task = Task(flat(module).numel())
        for step in range(6):
            optimizer.zero_grad()
            task.loss(model, 0, step).backward()
            optimizer.step()
        model.wait()
        assert model.consensus() <= 1e-6
        model.close()
        return flat(module)

    everyone = run_ranks(4, rank)
    plain, task = Quadratic(), Task(flat(Quadratic()).numel())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        task.loss(plain, 0, step).backward()
        optimizer.step()
    for ours in everyone:
        assert torch.allclose(ours, flat(plain), rtol=0, atol=1e-6)


@grid(case=ALL, size=[2, 3], cover=1)
def test_runs_repeat(case: Case, size: int) -> None:
    assert np.array_equal(trained(case, size, 5), trained(case, size, 5))
