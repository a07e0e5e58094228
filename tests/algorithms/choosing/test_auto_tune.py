"""AutoTune in training: all ranks choose alike, nothing that payloads lacked is lost, and a resumed run goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagua_kernels.algorithms import AutoTune
from bagua_kernels.algorithms.choosing.candidates import candidates
from bagua_kernels.algorithms.choosing.facts import Facts, slowest
from bagua_kernels.algorithms.exchanges.repaying import owed_by
from bagua_kernels.comm import Communicator, LocalCommunicator, run_ranks
from tests.algorithms.choosing.tuned import FAST, LOW_RANK, PLAIN, SIGN, SLOW, TOPK, Wide, force, sgd
from tests.algorithms.ranks import Odd, batch, loss_of
from tests.grids import grid


def test_candidates() -> None:
    everything = [one.label for one in candidates("synchronous", [10 << 20, 1 << 20], None, True, None)]
    assert everything[:2] == ["GradientAllReduce, 10 MiB", "GradientAllReduce, 1 MiB"]
    assert {"ByteGrad, 10 MiB", "SignSGD, 10 MiB", "PowerSGD 4, 10 MiB"} < set(everything)
    module = torch.nn.Linear(2560, 2048, bias=False)  # 20 MiB
    by_default = [one.label for one in candidates("synchronous", [10 << 20], module, True, None)]
    assert {"ByteGrad, 10 MiB", "PowerSGD 4, 14 MiB"} < set(by_default)
    careful = [one.label for one in candidates("synchronous", [10 << 20], None, False, None)]
    assert "ByteGrad, 10 MiB" in careful
    assert "4 bits, 10 MiB" in careful
    assert not any(label.startswith(("SignSGD", "TopK", "PowerSGD")) for label in careful)
    assert [one.label for one in candidates("exact", [1 << 20], None, True, None)] == ["GradientAllReduce, 1 MiB"]


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
        model = Wide()
        algorithm = AutoTune(model, sgd(model), communicator=communicator, bucket_bytes=600)
        labels = list(algorithm.chooser.candidates)
        applied: list[torch.Tensor] = []
        for step in range(steps):
            force(algorithm, labels[(step // 3) % len(labels)])
            algorithm.zero_grad()
            loss_of(algorithm, communicator.rank, step).backward()
            found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            applied = [a + b for a, b in zip(applied, found, strict=True)] if applied else found
        assert algorithm._engine is not None
        owed = owed_by(algorithm._engine.buckets.state())
        algorithm.close()
        return applied, owed

    everyone = run_ranks(2, rank)
    names = [name for name, p in Wide().named_parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in Wide().parameters() if p.requires_grad]
    for step in range(steps):
        for other in range(2):
            model = Wide()
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
        model = Wide()
        whole = AutoTune(model, sgd(model), communicator=communicator, facts=SLOW)
        optimizer = sgd(model)

        def train(algorithm: AutoTune, first: int, last: int) -> None:
            for step in range(first, last):
                optimizer_of = optimizer if algorithm is whole else again_optimizer
                optimizer_of.zero_grad()
                loss_of(algorithm, communicator.rank, step).backward()
                optimizer_of.step()

        other = Wide()
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


def owed_of(algorithm: AutoTune) -> dict[str, torch.Tensor]:
    assert algorithm._engine is not None
    return owed_by(algorithm._engine.buckets.state())


def test_a_rank_that_has_joined_switches_too() -> None:
    def rank(communicator: Communicator) -> tuple[str, list[torch.Tensor]]:
        model = Wide()
        algorithm = AutoTune(model, sgd(model), communicator=communicator, facts=SLOW)
        optimizer = sgd(model)
        with algorithm.join():
            for step in range(5 if communicator.rank else 30):
                optimizer.zero_grad()
                loss_of(algorithm, communicator.rank, step).backward()
                optimizer.step()
        found = algorithm.chooser.used.label, [p.detach().clone() for p in model.parameters()]
        algorithm.close()
        return found

    first, second = run_ranks(2, rank)
    assert first[0] == second[0]
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


@pytest.mark.parametrize("mode", ["eval", "inference"])
def test_forward_passes_that_are_not_for_training(mode: str) -> None:
    """Exact means come first in eval mode, too, and a pass under inference mode does no harm."""

    def rank(communicator: Communicator) -> None:
        model, plain = Wide(), Wide()
        algorithm = AutoTune(model, sgd(model), communicator=communicator)
        algorithm.train(mode != "eval")
        for step in range(12):
            algorithm.zero_grad()
            if mode == "inference":
                with torch.inference_mode():
                    algorithm(batch(0, 0))
            loss_of(algorithm, communicator.rank, step).backward()
            if not step:
                for other in range(2):
                    (loss_of(plain, other, 0) / 2).backward()
                for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(p.grad, q.grad)
        assert algorithm.search.state == "trying"
        algorithm.close()

    run_ranks(2, rank)


@grid(cover=1, following=[PLAIN, TOPK, LOW_RANK], spoiled=["overflow", "frozen"])
def test_what_is_owed_waits_for_a_step_that_is_taken(spoiled: str, following: str) -> None:
    """A step that a scaler skips, or that leaves a parameter out, pays nothing."""

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        model = Wide()
        algorithm = AutoTune(model, sgd(model), communicator=communicator)
        force(algorithm, SIGN)
        for step in range(3):
            algorithm.zero_grad()
            loss_of(algorithm, communicator.rank, step).backward()
        before = owed_of(algorithm)["second.weight"]
        force(algorithm, following)
        algorithm.zero_grad()
        if spoiled == "frozen":
            model.second.requires_grad_(False)
        (loss_of(algorithm, communicator.rank, 3) * (float("inf") if spoiled == "overflow" else 1.0)).backward()
        after = owed_of(algorithm)["second.weight"]
        algorithm.close()
        return before, after

    for before, after in run_ranks(2, rank):
        assert before.norm() > 0
        torch.testing.assert_close(after, before)


@grid(cover=1, follows=[False, True], following=[PLAIN, TOPK, LOW_RANK])
def test_a_checkpoint_between_two_candidates_keeps_what_is_owed(following: str, follows: bool) -> None:
    """Whether the next one's exchanges have been made or not; and none of it is paid twice."""

    def rank(communicator: Communicator) -> None:
        whole, again = Wide(), Wide()
        algorithm = AutoTune(whole, sgd(whole), communicator=communicator, facts=SLOW)
        other = AutoTune(again, sgd(again), communicator=communicator)
        force(algorithm, SIGN)
        for step in range(3):
            algorithm.zero_grad()
            loss_of(algorithm, communicator.rank, step).backward()
        # The next candidate's turn has come, and no step of it.
        algorithm.search.current, algorithm.search.state = following, "chosen"
        owed = {name: vector for name, vector in owed_of(algorithm).items() if vector.any()}
        assert owed
        if follows:
            algorithm.chooser.follow()
        again.load_state_dict(whole.state_dict())
        other.load_algorithm_state_dict(algorithm.algorithm_state_dict())
        assert other.chooser.used.label == following
        found = owed_of(other)
        assert all(torch.equal(found[name], owed[name]) for name in owed)
        algorithm.chooser.follow()
        for each, model in ((algorithm, whole), (other, again)):
            each.zero_grad()
            loss_of(each, communicator.rank, 3).backward()
            sgd(model).step()
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
        algorithm.close()
        other.close()

    run_ranks(2, rank)


def test_states_of_other_candidates_are_refused() -> None:
    def rank(communicator: Communicator) -> None:
        model = Wide()
        algorithm = AutoTune(model, sgd(model), communicator=communicator, facts=SLOW)
        exact = AutoTune(Wide(), communicator=communicator, exactness="exact")
        before = exact.search.save()
        with pytest.raises(ValueError, match=r"saved with the candidate .* use the same exactness and bucket_bytes"):
            exact.load_algorithm_state_dict(algorithm.algorithm_state_dict())
        assert exact.search.save() == before
        algorithm.close()
        exact.close()

    run_ranks(2, rank)


def test_parameters_without_elements() -> None:
    def rank(communicator: Communicator) -> None:
        model = torch.nn.Module()
        model.empty = torch.nn.Parameter(torch.zeros(0, 3))
        model.forward = lambda: model.empty.sum()
        algorithm = AutoTune(model, torch.optim.SGD([model.empty], lr=0.1), communicator=communicator)
        for _ in range(10):
            algorithm().backward()
        algorithm.close()

    run_ranks(2, rank)


def test_one_rank_alone() -> None:
    model = Odd(0)
    algorithm = AutoTune(model, sgd(model), communicator=LocalCommunicator.alone())
    algorithm(batch(0, 0)).sum().backward()
    assert algorithm.search.state == "measuring"


def test_refusals() -> None:
    with pytest.raises(ValueError, match="expected exactness to be one of exact, synchronous, any, got 'some'"):
        AutoTune(Odd(), exactness="some")
    with pytest.raises(ValueError, match="pass the optimizer"):
        AutoTune(Odd(), exactness="any")
    with pytest.raises(ValueError, match="bucket_bytes must be at least 1"):
        AutoTune(Odd(), bucket_bytes=0)
