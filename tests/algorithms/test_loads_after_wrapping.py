"""States that are loaded into a wrapper, as into torch's: training goes on from them, as it does in one process of torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import from_spec
from bagua_kernels.comm import Communicator, run_ranks
from tests.algorithms.ranks import Odd, loss_of
from tests.grids import grid

SPECS = [
    "local_sgd:interval=3",
    "slow_mo:interval=3",
    "diloco:interval=3",
    "sparse_loco:interval=3",
    "decentralized",
    "async_model_average",
    "async_decentralized",
    "bytegrad",
]
# By spec, the largest difference from torch: where ranks have the same batches, these are the optimizer alone.
AS_ONE_PROCESS = {
    "allreduce": 1e-6,
    "bytegrad": 1e-3,
    "local_sgd:interval=3": 1e-6,
    "slow_mo:interval=3,slow_lr=1,slow_momentum=0": 1e-6,
    "diloco:interval=3,outer_lr=1,outer_momentum=0": 1e-6,
    "decentralized": 1e-6,
}
RANKS, LOADED = 2, 7


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int = 0) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, number).backward()
    optimizer.step()


def by_torch(before: int, after: int, lr: float) -> torch.Tensor:
    """What one process without this package has in the end."""
    net = Odd()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for number in range(before):
        step(net, optimizer, number)
    net.load_state_dict(Odd(LOADED).state_dict())
    for number in range(before, before + after):
        step(net, optimizer, number)
    return values(net)


def values(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def by_ranks(spec: str, before: int, after: int, lr: float, batches: bool) -> list[torch.Tensor]:
    """What each rank has in the end, where ranks began from seeds of their own.

    Args:
        spec: of the algorithm.
        before: steps before the load.
        after: steps after it.
        lr: the learning rate.
        batches: True where each rank has batches of its own.
    """

    def rank(communicator: Communicator) -> torch.Tensor:
        net, who = Odd(communicator.rank), communicator.rank if batches else 0
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
        model = from_spec(spec, net, optimizer, communicator=communicator)
        for number in range(before):
            step(model, optimizer, number, who)
        model.wait()
        state = Odd(LOADED).state_dict()
        model.load_state_dict({f"module.{name}": value for name, value in state.items()})
        for number in range(before, before + after):
            step(model, optimizer, number, who)
        model.synchronize()
        model.close()
        return values(net)

    return run_ranks(RANKS, rank, timeout=60)


@grid(spec=SPECS, before=[0, 1, 3, 4], after=[1, 7])
def test_loaded_values_stay_without_steps_of_the_optimizer(spec: str, before: int, after: int) -> None:
    """The learning rate is 0, so neither rounds nor averages may move them."""
    expected = by_torch(before, after, lr=0.0)
    assert torch.equal(expected, values(Odd(LOADED)))
    for found in by_ranks(spec, before, after, lr=0.0, batches=True):
        assert float((found - expected).abs().max()) <= 1e-5


@grid(spec__most=list(AS_ONE_PROCESS.items()), before=[0, 1, 3, 4], after=[1, 6, 7])
def test_training_goes_on_as_in_one_process(spec: str, most: float, before: int, after: int) -> None:
    """With the optimizer's momenta, which a load of the module leaves as they are."""
    expected = by_torch(before, after, lr=0.1)
    assert float((expected - values(Odd(LOADED))).abs().max()) > 10 * most
    for found in by_ranks(spec, before, after, lr=0.1, batches=False):
        assert float((found - expected).abs().max()) <= most


@pytest.mark.parametrize("spec", SPECS)
def test_a_wrapper_gives_what_it_has_loaded(spec: str) -> None:
    """Before a step as well, under the names of the wrapper."""

    def rank(communicator: Communicator) -> None:
        net = Odd(communicator.rank)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = from_spec(spec, net, optimizer, communicator=communicator)
        state = {f"module.{name}": value for name, value in Odd(LOADED).state_dict().items()}
        model.load_state_dict(state)
        found = model.state_dict()
        assert list(found) == list(state)
        assert all(torch.equal(found[name], state[name]) for name in state)
        model.close()

    run_ranks(RANKS, rank, timeout=60)
