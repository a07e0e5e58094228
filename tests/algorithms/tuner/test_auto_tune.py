"""AutoTune in training: all ranks choose alike, nothing that payloads lacked is lost, and a resumed run goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import AutoTune
from bagua_kernels.algorithms.tuner.candidates import candidates
from bagua_kernels.algorithms.tuner.facts import Facts, slowest
from bagua_kernels.algorithms.tuner.repaying import owed_by
from bagua_kernels.comm import Communicator, LocalCommunicator, run_ranks
from tests.algorithms.ranks import Odd, batch, loss_of

CODECS = {
    "minmax_uint8": 1e-9,
    "absmax_int8": 1e-9,
    "absmax_int4": 1e-9,
    "sign": 1e-9,
    "topk": 1e-9,
    "cast": 1e-9,
    "": 1e-9,
}
SLOW = Facts(step=10.0, waited=9.9, exchange=9.95, sent=4e3, latency=1e-4, codecs=CODECS, pass_over=1e-10)
FAST = Facts(step=0.1, waited=0.0, exchange=1e-5, sent=4e3, latency=0.0, codecs=CODECS | {"": 1e-3, "sign": 1e-3, "topk": 1e-3,
             "minmax_uint8": 1e-3, "absmax_int8": 1e-3, "absmax_int4": 1e-3}, pass_over=1e-3)  # fmt: skip


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)


def test_candidates() -> None:
    everything = [one.label for one in candidates("synchronous", [10 << 20, 1 << 20], True, None)]
    assert everything[:2] == ["GradientAllReduce, 10 MiB", "GradientAllReduce, 1 MiB"]
    assert {"ByteGrad, 10 MiB", "SignSGD, 10 MiB", "PowerSGD 4, 10 MiB"} < set(everything)
    careful = [one.label for one in candidates("synchronous", [10 << 20], False, None)]
    assert "ByteGrad, 10 MiB" in careful
    assert "4 bits, 10 MiB" in careful
    assert not any(label.startswith(("SignSGD", "TopK", "PowerSGD")) for label in careful)
    assert [one.label for one in candidates("exact", [1 << 20], True, None)] == ["GradientAllReduce, 1 MiB"]


def test_the_slowest_rank_counts() -> None:
    found = slowest([SLOW, FAST])
    assert (found.step, found.latency, found.codecs["sign"], found.pass_over) == (10.0, 1e-4, 1e-3, 1e-3)


def test_measured_in_training() -> None:
    """All ranks decide within 60 steps, alike, and stay bit-identical throughout."""

    def rank(communicator: Communicator) -> tuple[Any, ...]:
        model = Odd(communicator.rank)
        algorithm = AutoTune(model, sgd(model), communicator=communicator)
        optimizer, states = sgd(model), []
        for step in range(60):
            optimizer.zero_grad()
            loss_of(algorithm, communicator.rank, step).backward()
            optimizer.step()
            states.append(algorithm.search.state)
        assert states[0] == "measuring"
        assert states[-1] == "chosen"
        assert "Mbit/s" in str(algorithm.table().title)
        found = [p.detach().clone() for p in model.parameters()], algorithm.search.save(), algorithm.facts
        algorithm.close()
        return found

    first, *others = run_ranks(3, rank)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first[0], other[0], strict=True))
        assert other[1:] == first[1:]


@pytest.mark.parametrize(("facts", "plain"), [(SLOW, False), (FAST, True)])
def test_given_facts(facts: Facts, plain: bool) -> None:
    """The same measurements give the same predictions and the same trial."""

    def rank(communicator: Communicator) -> tuple[Any, ...]:
        model = Odd(0)
        algorithm = AutoTune(model, sgd(model), communicator=communicator, facts=facts)
        found = algorithm.search.predicted, list(algorithm.search.tried), algorithm.search.current
        algorithm.close()
        return found

    first, second = run_ranks(2, rank)
    assert first == second == run_ranks(2, rank)[0]
    assert ("GradientAllReduce" in first[2]) == plain


def test_nothing_is_lost_between_candidates() -> None:
    """What was applied and what is still owed add up to all ranks' gradients, through all candidates."""
    steps = 40

    def rank(communicator: Communicator) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        model = Odd(0)
        algorithm = AutoTune(model, sgd(model), communicator=communicator, bucket_bytes=600)
        labels = list(algorithm.candidates)
        applied: list[torch.Tensor] = []
        for step in range(steps):
            algorithm.search.current = labels[(step // 3) % len(labels)]
            algorithm.search.state = "chosen"
            algorithm.zero_grad()
            loss_of(algorithm, communicator.rank, step).backward()
            found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            applied = [a + b for a, b in zip(applied, found, strict=True)] if applied else found
        assert algorithm._engine is not None
        owed = owed_by(algorithm._engine.buckets.state())
        algorithm.close()
        return applied, owed

    everyone = run_ranks(2, rank)
    names = [name for name, p in Odd().named_parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in Odd().parameters() if p.requires_grad]
    for step in range(steps):
        for other in range(2):
            model = Odd(0)
            loss_of(model, other, step).backward()
            given = [p.grad for p in model.parameters() if p.grad is not None]
            total = [a + b / 2 for a, b in zip(total, given, strict=True)]
    for name, applied, expected in zip(names, everyone[0][0], total, strict=True):
        lacking = [one[1].get(name, torch.zeros(expected.numel())) for one in everyone]
        torch.testing.assert_close(
            applied.flatten() + torch.stack(lacking).mean(0), expected.flatten(), rtol=1e-3, atol=2e-2
        )


def test_resumed() -> None:
    """A checkpoint has the choice, so that a run goes on with it bit for bit."""

    def rank(communicator: Communicator) -> None:
        model = Odd(0)
        whole = AutoTune(model, sgd(model), communicator=communicator, facts=SLOW)
        optimizer = sgd(model)

        def train(algorithm: AutoTune, first: int, last: int) -> None:
            for step in range(first, last):
                optimizer_of = optimizer if algorithm is whole else again_optimizer
                optimizer_of.zero_grad()
                loss_of(algorithm, communicator.rank, step).backward()
                optimizer_of.step()

        other = Odd(0)
        again = AutoTune(other, sgd(other), communicator=communicator)
        again_optimizer = sgd(other)
        train(whole, 0, 30)
        assert whole.search.state == "chosen"
        other.load_state_dict(model.state_dict())
        again.load_algorithm_state_dict(whole.algorithm_state_dict())
        assert again.search.current == whole.search.current
        assert again.facts == whole.facts
        train(whole, 30, 34)
        train(again, 30, 34)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        whole.close()
        again.close()

    run_ranks(2, rank)


def test_one_rank_alone() -> None:
    model = Odd(0)
    algorithm = AutoTune(model, sgd(model), communicator=LocalCommunicator.alone())
    algorithm(batch(0, 0)).sum().backward()
    assert algorithm.search.state == "measuring"


def test_refusals() -> None:
    with pytest.raises(ValueError, match="expected exactness to be one of exact, synchronous, got 'any'"):
        AutoTune(Odd(), exactness="any")
    with pytest.raises(ValueError, match="bucket_bytes must be at least 1"):
        AutoTune(Odd(), bucket_bytes=0)
