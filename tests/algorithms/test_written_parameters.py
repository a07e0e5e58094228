"""Parameters that others write between steps: values are taken as they are, and what is put back was no write."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import Algorithm, ModelAlgorithm, StochasticGradientPush, from_spec
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.comm.topology import GivenMatrix
from bagua_kernels.errors import CommunicationError, MismatchError
from tests.algorithms.ranks import Odd, fill, loss_of
from tests.grids import grid

OUTER = [
    "local_sgd:interval=3",
    "local_sgd:interval=3,codec=sign",
    "slow_mo:interval=3",
    "diloco:interval=3",
    "diloco:interval=3,delay=2",
    "diloco:interval=3,codec=absmax_int8",
    "sparse_loco:interval=3",
]
GOSSIP = ["decentralized", "d2", "sgp", "lowprec", "choco:eta=0.5"]
ASYNCHRONOUS = ["async_model_average:interval=1", "async_model_average:interval_ms=1", "async_decentralized", "wagma"]


class Loop:
    """Steps of a model, with a learning rate that may be 0."""

    def __init__(self, communicator: Communicator, spec: str, lr: float) -> None:
        self.rank, self.number = communicator.rank, 0
        self.net = Odd()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=lr)
        self.model: Algorithm = from_spec(spec, self.net, self.optimizer, communicator=communicator)

    def steps(self, count: int, passes: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            for _ in range(passes):
                loss_of(self.model, self.rank, self.number).backward()
            self.optimizer.step()
            self.number += 1

    def wait(self) -> None:
        assert isinstance(self.model, ModelAlgorithm)
        self.model.wait()

    def values(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.net.parameters()])


def by_load(net: nn.Module) -> None:
    other = Odd(7)
    net.load_state_dict(other.state_dict())


def by_data(net: nn.Module) -> None:
    for parameter, value in zip(net.parameters(), Odd(7).parameters(), strict=True):
        parameter.data.copy_(value)


def by_new_memory(net: nn.Module) -> None:
    for parameter, value in zip(net.parameters(), Odd(7).parameters(), strict=True):
        parameter.data = value.detach().clone()


WAYS: dict[str, Callable[[nn.Module], None]] = {"load": by_load, "data": by_data, "new memory": by_new_memory}


@grid(spec=OUTER + GOSSIP + ASYNCHRONOUS, before=[0, 1, 3], way=WAYS, waits=[False, True], passes=[1, 2])
def test_values_that_all_ranks_load_stay(
    spec: str, before: int, way: Callable[[nn.Module], None], waits: bool, passes: int
) -> None:
    """With a learning rate of 0 nothing else moves parameters."""

    def rank(communicator: Communicator) -> torch.Tensor:
        loop = Loop(communicator, spec, lr=0.0)
        loop.steps(before)
        if waits:
            loop.wait()
        way(loop.net)
        loop.steps(8, passes)
        loop.model.synchronize()
        loop.model.close()
        return loop.values()

    expected = torch.cat([p.detach().reshape(-1) for p in Odd(7).parameters()])
    for found in run_ranks(2, rank, timeout=60):
        # One step of the encoded differences, of which the last is small.
        assert float((found - expected).abs().max()) <= 2e-5


@grid(spec=OUTER + GOSSIP + ASYNCHRONOUS, waits=[False, True], passes=[1, 2])
def test_a_load_is_no_part_of_a_step_however_small(spec: str, waits: bool, passes: int) -> None:
    """What is loaded moves parameters no further than the step did that it undoes."""
    if spec.startswith("diloco"):
        spec += ",outer_lr=0.9,outer_momentum=0.0"  # momentum of before would move what was loaded

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        loop = Loop(communicator, spec, lr=0.1)
        loop.steps(2)
        loop.model.synchronize()
        saved, expected = {name: value.clone() for name, value in loop.net.state_dict().items()}, loop.values()
        loop.steps(1)
        if waits:
            loop.wait()
        loop.net.load_state_dict(saved)
        loop.optimizer.param_groups[0]["lr"] = 0.0
        loop.steps(8, passes)
        loop.model.synchronize()
        loop.model.close()
        return loop.values(), expected

    for found, expected in run_ranks(2, rank, timeout=60):
        assert float((found - expected).abs().max()) <= 2e-5


@grid(spec=[*OUTER, *GOSSIP, "async_decentralized", "wagma"], waits=[False, True], loads=[False, True])
def test_a_running_mean_that_is_put_back_changes_nothing(spec: str, waits: bool, loads: bool) -> None:
    """Stored, copied in, evaluated and put back, on one rank alone: the training is that without it."""

    def rank(communicator: Communicator, evaluates: bool) -> torch.Tensor:
        loop = Loop(communicator, spec, lr=0.1)
        for _ in range(3):
            loop.steps(2)
            if waits:
                loop.wait()
            if evaluates and communicator.rank == 0:
                own = {name: value.clone() for name, value in loop.net.state_dict().items()}
                if loads:
                    loop.net.load_state_dict(Odd(9).state_dict())
                else:
                    fill(loop.net, 9)
                loop.model.eval()
                with torch.no_grad():
                    loss_of(loop.model, 0, 99)
                    if loads:
                        loop.net.load_state_dict(own)
                    else:
                        for name, parameter in loop.net.named_parameters():
                            parameter.copy_(own[name])
                loop.model.train()
        loop.model.synchronize()
        loop.model.close()
        return loop.values()

    plain, evaluated = (run_ranks(2, rank, evaluates, timeout=60) for evaluates in (False, True))
    if spec in ("async_decentralized", "wagma"):
        assert all(bool(each.isfinite().all()) for each in evaluated)
    else:
        assert all(map(torch.equal, plain, evaluated))


@pytest.mark.parametrize("spec", ASYNCHRONOUS)
def test_what_is_evaluated_is_not_published(spec: str) -> None:
    def rank(communicator: Communicator) -> float:
        loop = Loop(communicator, spec, lr=0.0)
        most = 0.0
        loop.steps(3)
        if communicator.rank == 0:
            loop.wait()
            own = [p.detach().clone() for p in loop.net.parameters()]
            with torch.no_grad():
                for parameter in loop.net.parameters():
                    parameter.fill_(100.0)
                time.sleep(0.1)
                for parameter, value in zip(loop.net.parameters(), own, strict=True):
                    parameter.copy_(value)
        for _ in range(20):
            loop.steps(1)
            time.sleep(0.005)
            most = max(most, float(loop.values().abs().max()))
        loop.model.close()
        return most

    assert max(run_ranks(2, rank, timeout=60)) < 2


@grid(spec=[spec for spec in OUTER if spec != "local_sgd:interval=3"], who=["one", "different"])
def test_outer_parameters_must_be_equal(spec: str, who: str) -> None:
    def rank(communicator: Communicator) -> str:
        loop = Loop(communicator, spec, lr=0.01)
        loop.steps(1)
        if who == "different" or communicator.rank == 0:
            fill(loop.net, 3 + communicator.rank)
        try:
            loop.steps(8)
            loop.model.synchronize()
        except CommunicationError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    found = run_ranks(2, rank, timeout=20)
    assert all(found)
    told = [text for text in found if text.startswith(MismatchError.__name__)]
    assert told
    assert any("'scale' is the first that differs" in text or "weight' is the first" in text for text in told)
    assert any("call synchronize() on all ranks after it" in text for text in told)


@grid(spec=[*OUTER, "decentralized", "sgp"], cover=1)
def test_a_rank_that_leaves_out_all_steps_after_a_write_has_it(spec: str) -> None:
    """It takes part in the others' rounds at its next call, with what was written."""

    def rank(communicator: Communicator) -> bool:
        loop = Loop(communicator, spec, lr=0.0)
        loop.steps(4)
        by_load(loop.net)
        written = loop.values()
        if communicator.rank == 0:
            loop.steps(4)
        else:
            for number in range(4, 8):
                loop.optimizer.zero_grad()
                loss_of(loop.model, loop.rank, number).backward()
        loop.model.synchronize()
        found = loop.values()
        loop.model.close()
        return bool((found - written).abs().max() < 1e-6)

    assert run_ranks(2, rank, timeout=20) == [True, True]


@grid(spec=OUTER, cover=1)
def test_synchronize_after_other_values_on_each_rank(spec: str) -> None:
    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        loop = Loop(communicator, spec, lr=0.0)
        loop.steps(1)
        with torch.no_grad():
            for parameter in loop.net.parameters():
                parameter.fill_(1.0 + communicator.rank)
        loop.model.synchronize()
        mean = loop.values()
        loop.steps(7)
        loop.model.close()
        return mean, loop.values()

    for mean, last in run_ranks(2, rank, timeout=20):
        trained = torch.cat([torch.full((p.numel(),), 1.5 if p.requires_grad else 0.0) for p in Odd().parameters()])
        assert torch.equal(mean[trained > 0], trained[trained > 0])
        assert float((last - mean).abs().max()) < 1e-5


@grid(spec=OUTER + GOSSIP + ASYNCHRONOUS, cover=1)
def test_clamping_after_each_step_is_part_of_it(spec: str) -> None:
    def rank(communicator: Communicator) -> bool:
        loop = Loop(communicator, spec, lr=0.3)
        for _ in range(7):
            loop.steps(1)
            loop.wait()
            with torch.no_grad():
                for parameter in loop.net.parameters():
                    parameter.clamp_(-0.35, 0.35)
        loop.model.close()
        return bool(loop.values().isfinite().all())

    assert all(run_ranks(2, rank, timeout=20))


@grid(spec=OUTER + GOSSIP + ASYNCHRONOUS, cover=1)
def test_another_optimizers_steps_are_told(spec: str) -> None:
    def rank(communicator: Communicator) -> None:
        loop = Loop(communicator, spec, lr=0.1)
        loop.optimizer = torch.optim.SGD(loop.net.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match="without a step of the SGD that was given"):
            loop.steps(5)
        # A rank that ends earlier is lost to the other's averages.
        communicator.barrier().wait()

    run_ranks(2, rank, timeout=20)


@grid(spec=["decentralized", "diloco:interval=2", "wagma", "d2"], cover=1)
def test_perturbed_passes_are_no_strays(spec: str) -> None:
    """Sharpness-aware minimisation: a pass at other parameters, which are put back before the step."""

    def rank(communicator: Communicator) -> None:
        loop = Loop(communicator, spec, lr=0.1)
        for number in range(5):
            loop.optimizer.zero_grad()
            loss_of(loop.model, loop.rank, number).backward()
            own = [p.detach().clone() for p in loop.net.parameters()]
            with torch.no_grad():
                for parameter in loop.net.parameters():
                    parameter.add_(0.1)
            loop.optimizer.zero_grad()
            loss_of(loop.model, loop.rank, number).backward()
            with torch.no_grad():
                for parameter, value in zip(loop.net.parameters(), own, strict=True):
                    parameter.copy_(value)
            loop.optimizer.step()
        loop.model.close()

    run_ranks(2, rank, timeout=20)


@grid(call=["consensus", "averaged", "algorithm_state_dict"], dtype=[torch.float32, torch.float64])
@pytest.mark.parametrize("spec", ["decentralized", "decentralized:peers=all", "d2"])
def test_calls_that_read_between_forward_and_backward(spec: str, call: str, dtype: torch.dtype) -> None:
    def rank(communicator: Communicator, calls: bool) -> torch.Tensor:
        net = Odd().to(dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = from_spec(spec, net, optimizer, communicator=communicator)
        assert isinstance(model, ModelAlgorithm)
        for step in range(4):
            optimizer.zero_grad()
            x = torch.full((2, 7), step + communicator.rank + 1.0, dtype=dtype)
            loss = model(x).square().mean()
            if calls and call == "averaged":
                with model.averaged():
                    pass
            elif calls:
                getattr(model, call)()
            loss.backward()
            optimizer.step()
        model.wait()
        values = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
        model.close()
        return values

    plain, called = (run_ranks(3, rank, calls, timeout=20) for calls in (False, True))
    assert all(map(torch.equal, plain, called))


def test_writing_calls_between_forward_and_backward_raise() -> None:
    """Autograd would not notice that its parameters are others now."""

    def rank(communicator: Communicator) -> None:
        loop = Loop(communicator, "decentralized", lr=0.1)
        loop.steps(1)
        loss = loss_of(loop.model, loop.rank, 1)
        loop.model.synchronize()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        loop.optimizer.zero_grad()
        loop.steps(2)
        loop.model.close()

    run_ranks(2, rank, timeout=20)


@grid(spec=ASYNCHRONOUS, call=["consensus", "averaged"])
def test_asynchronous_calls_that_read_between_forward_and_backward(spec: str, call: str) -> None:
    """Gradients are those at the parameters of the forward pass."""

    def rank(communicator: Communicator) -> None:
        loop = Loop(communicator, spec, lr=0.1)
        for number in range(5):
            loop.optimizer.zero_grad()
            loss = loss_of(loop.model, loop.rank, number)
            trained = [p for p in loop.net.parameters() if p.requires_grad]
            expected = torch.autograd.grad(loss, trained, retain_graph=True)
            if call == "averaged":
                with loop.model.averaged():
                    pass
            else:
                loop.model.consensus()
            loss.backward()
            for parameter, gradient in zip(trained, expected, strict=True):
                assert parameter.grad is not None
                assert torch.allclose(parameter.grad, gradient, rtol=1e-5, atol=1e-7)
            loop.optimizer.step()
        loop.model.close()

    run_ranks(2, rank, timeout=30)


@pytest.mark.parametrize("spec", ["local_sgd:interval=3", "slow_mo:interval=3", "diloco:interval=3", "decentralized"])
def test_new_memory_after_a_batch_that_is_left_out(spec: str) -> None:
    def rank(communicator: Communicator, moves: bool) -> torch.Tensor:
        loop = Loop(communicator, spec, lr=0.1)
        loop.steps(3)
        loss_of(loop.model, loop.rank, 3)
        if moves and communicator.rank == 0:
            for parameter in loop.net.parameters():
                parameter.data = parameter.data.clone()
        loop.steps(3)
        loop.model.synchronize()
        loop.model.close()
        return loop.values()

    plain, moved = (run_ranks(2, rank, moves, timeout=20) for moves in (False, True))
    assert all(map(torch.equal, plain, moved))


@grid(spec=["d2", "choco:eta=0.5", "lowprec", "decentralized"], event=["consensus", "stats", "evaluation", "resume"])
def test_what_happens_in_the_step_after_a_load(spec: str, event: str) -> None:
    """The load stays noticed, and a checkpoint contains what is still to be taken over."""

    def rank(communicator: Communicator, happens: bool) -> torch.Tensor:
        loop = Loop(communicator, spec, lr=0.05)
        loop.steps(2)
        by_load(loop.net)
        if event == "resume":
            loop.steps(1)
            if happens:
                state = loop.model.algorithm_state_dict()
                loop.model.close()
                loop.net = Odd()
                loop.optimizer = torch.optim.SGD(loop.net.parameters(), lr=0.05)
                loop.model = from_spec(spec, loop.net, loop.optimizer, communicator=communicator)
                loop.model.load_algorithm_state_dict(state)
        else:
            loop.optimizer.zero_grad()
            loss = loss_of(loop.model, loop.rank, 2)
            if happens and event == "evaluation":
                loop.model.eval()
                with torch.no_grad():
                    loss_of(loop.model, loop.rank, 77)
                loop.model.train()
            elif happens:
                getattr(loop.model, event)()
            loss.backward()
            loop.optimizer.step()
            loop.number += 1
        loop.steps(3)
        loop.wait()
        values = torch.cat([p.detach().reshape(-1) for p in loop.net.parameters() if p.requires_grad])
        loop.model.close()
        return values

    plain, found = (run_ranks(3, rank, happens, timeout=20) for happens in (False, True))
    assert all(map(torch.equal, plain, found))


@pytest.mark.parametrize("steps", [3, 4])
def test_the_mean_of_pushed_parameters_between_rounds(steps: int) -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        net = nn.Linear(1, 1, bias=False).double()
        with torch.no_grad():
            net.weight.zero_()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        columns = GivenMatrix(3, [[0.5, 0.0, 0.25], [0.5, 0.5, 0.25], [0.0, 0.5, 0.5]])
        model = StochasticGradientPush(net, optimizer, communicator=communicator, peers=columns, interval=2)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.full((1, 1), 1.0 + communicator.rank, dtype=torch.float64)).sum().backward()
            optimizer.step()
        with model.averaged():
            mean = net.weight.detach().clone()
        model.synchronize()
        assert torch.allclose(net.weight, mean, rtol=1e-12)
        model.close()
        return mean

    # The gradient is 1, 2, 3.
    assert all(abs(float(mean) + 0.2 * steps) < 1e-12 for mean in run_ranks(3, rank, timeout=20))


@grid(spec=[*OUTER, "d2", "choco:eta=0.5", "async_decentralized"], cover=1)
def test_a_load_before_a_batch_that_is_left_out(spec: str) -> None:
    def rank(communicator: Communicator) -> torch.Tensor:
        loop = Loop(communicator, spec, lr=0.0)
        loop.steps(3)
        by_load(loop.net)
        if communicator.rank == 0:
            loop.steps(1)
        else:
            loss_of(loop.model, loop.rank, 3)
        loop.model.synchronize()
        loop.model.close()
        return loop.values()

    expected = torch.cat([p.detach().reshape(-1) for p in Odd(7).parameters()])
    for found in run_ranks(2, rank, timeout=20):
        assert float((found - expected).abs().max()) <= 2e-5


@grid(spec=[*GOSSIP, *OUTER, *ASYNCHRONOUS], cover=1)
def test_statistics_between_forward_and_backward(spec: str) -> None:
    def rank(communicator: Communicator) -> None:
        loop = Loop(communicator, spec, lr=0.1)
        for number in range(4):
            loop.optimizer.zero_grad()
            loss = loss_of(loop.model, loop.rank, number)
            loop.model.stats()
            loss.backward()
            loop.optimizer.step()
        loop.model.close()

    run_ranks(2, rank, timeout=20)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_synchronize_after_a_load_with_pushed_weights(steps: int) -> None:
    """The mean is that of what was loaded, though weights are not 1 and a round is under way."""

    def rank(communicator: Communicator) -> torch.Tensor:
        net = Odd()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        columns = GivenMatrix(3, [[0.5, 0.0, 0.25], [0.5, 0.5, 0.25], [0.0, 0.5, 0.5]])
        model = StochasticGradientPush(net, optimizer, communicator=communicator, peers=columns)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, communicator.rank, step).backward()
            optimizer.step()
        by_load(net)
        model.synchronize()
        model.close()
        return torch.cat([p.detach().reshape(-1) for p in net.parameters()])

    expected = torch.cat([p.detach().reshape(-1) for p in Odd(7).parameters()])
    for found in run_ranks(3, rank, timeout=20):
        assert float((found - expected).abs().max()) < 1e-6
