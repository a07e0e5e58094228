"""The same exchange carried out otherwise, and what follows where anything may change."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels import algorithms, optim
from bagua_kernels.algorithms import Algorithm, AutoTune, ModelAlgorithm
from bagua_kernels.algorithms.tuner.cost.methods import methods
from bagua_kernels.comm import Communicator, StripedCommunicator, run_ranks
from bagua_kernels.compression.codec import parse_spec
from tests.algorithms.ranks import loss_of
from tests.algorithms.tuner.tuned import FAST, SIGN, SLOW, Wide, force, sgd


def trained(algorithm: AutoTune, optimizer: torch.optim.Optimizer, labels: list[str], rank: int) -> list[torch.Tensor]:
    """Two steps with each candidate; returns the parameters."""
    for step in range(2 * len(labels)):
        force(algorithm, labels[step // 2])
        optimizer.zero_grad()
        loss_of(algorithm, rank, step).backward()
        optimizer.step()
    algorithm.close()
    return [p.detach().clone() for p in algorithm.module.parameters()]


def test_exact_means_have_the_same_bits_however_they_are_carried_out() -> None:
    """Steps in backward and after it, one exchange at a time and two, in buckets of all sizes."""

    def rank(communicator: Communicator) -> list[list[torch.Tensor]]:
        found = []
        for varies in (True, False):
            model = Wide()
            optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            algorithm = AutoTune(
                model, optimizer, communicator=communicator, exactness="exact", apply_in_backward=True, bucket_bytes=600
            )
            labels = list(algorithm.candidates)
            assert sum(", one at a time" in label for label in labels) == 3
            assert sum(", in backward" in label for label in labels) == 6
            assert all(label.startswith("GradientAllReduce") for label in labels)
            found.append(
                trained(algorithm, optimizer, labels if varies else labels[:1] * len(labels), communicator.rank)
            )
        return found

    everyone = run_ranks(2, rank)
    for found in everyone:
        assert all(torch.equal(a, b) for a, b in zip(found[0], everyone[0][1], strict=True))


def test_means_by_nodes_are_a_candidate() -> None:
    def rank(communicator: Communicator) -> list[list[torch.Tensor]]:
        found = []
        for varies in (True, False):
            model = Wide()
            optimizer = sgd(model)
            algorithm = AutoTune(
                model, optimizer, communicator=communicator, exactness="exact", nodes=[[0, 2], [1, 3]], bucket_bytes=600
            )
            labels = [label for label in algorithm.candidates if ", by nodes" in label]
            assert len(labels) == 1
            labels = [*labels, algorithm.search.plain, *labels] if varies else [algorithm.search.plain] * 3
            found.append(trained(algorithm, optimizer, labels, communicator.rank))
        return found

    everyone = run_ranks(4, rank)
    for found in everyone:
        for a, b, other in zip(*found, everyone[0][0], strict=True):
            torch.testing.assert_close(a, b)
            assert torch.equal(a, other)


def test_numbers_of_sockets_are_variations() -> None:
    def rank(base: Communicator) -> tuple[list[int], list[torch.Tensor]]:
        communicator = StripedCommunicator(base.duplicate(), stripes=2)
        model = Wide()
        algorithm = AutoTune(model, sgd(model), communicator=communicator, exactness="exact", bucket_bytes=600)
        plain = algorithm.search.plain
        labels = [plain, f"{plain}, sockets: 2", f"{plain}, one at a time", f"{plain}, sockets: 2", plain]
        used, optimizer = [], sgd(model)
        for step, label in enumerate(labels):
            force(algorithm, label)
            optimizer.zero_grad()
            loss_of(algorithm, communicator.rank, step).backward()
            optimizer.step()
            own = algorithm._communicators()
            assert all(isinstance(one, StripedCommunicator) for one in own)
            used.append(own[0].tuning.stripes)
        algorithm.close()
        communicator.close()
        return used, [p.detach().clone() for p in model.parameters()]

    first, second = run_ranks(2, rank)
    assert first[0] == second[0] == [1, 2, 1, 2, 1]
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_any_goes_on_with_another_algorithm(size: int) -> None:
    """Where it is predicted to be faster, after what payloads have lacked is paid."""

    def rank(communicator: Communicator) -> tuple[list[str], float]:
        model = Wide()
        optimizer = sgd(model)
        algorithm: Algorithm = AutoTune(model, optimizer, communicator=communicator, facts=SLOW, exactness="any")
        assert isinstance(algorithm, AutoTune)
        force(algorithm, SIGN)
        names = []
        for step in range(40):
            optimizer.zero_grad()
            loss_of(algorithm, communicator.rank, step).backward()
            optimizer.step()
            before = algorithm
            algorithm = algorithm.settled() if isinstance(algorithm, AutoTune) and step > 2 else algorithm
            if algorithm is not before:
                assert before._closed
            names.append(type(algorithm).__name__)
        steps = algorithm.stats().steps
        algorithm.close()
        return names, steps

    first, *others = run_ranks(size, rank)
    assert all(other == first for other in others)
    names, steps = first
    assert steps == 40
    # The fourth step has signs, the fifth is exact, and pays.
    assert names[:4] == ["AutoTune"] * 4
    assert issubclass(getattr(algorithms, names[4]), ModelAlgorithm)
    assert len(set(names[4:])) == 1


def test_any_stays_where_nothing_is_faster() -> None:
    def rank(communicator: Communicator) -> None:
        model = Wide()
        algorithm = AutoTune(model, sgd(model), communicator=communicator, facts=FAST, exactness="any")
        assert algorithm.settled() is algorithm
        force(algorithm, algorithm.search.plain)
        assert algorithm.settled() is algorithm
        assert "DiLoCo 30" in algorithm.elsewhere
        assert algorithm.table().row_count > len(algorithm.elsewhere)
        algorithm.close()

    run_ranks(2, rank)


def test_every_algorithm_of_another_class_can_follow() -> None:
    def rank(communicator: Communicator) -> None:
        for method in methods():
            if method.exactness == "any":
                model = Wide()
                optimizer = sgd(model)
                first = AutoTune(model, optimizer, communicator=communicator, facts=SLOW, exactness="any")
                force(first, first.search.plain)
                first.elsewhere = {method.name: 1e-9}
                other = first.settled()
                assert isinstance(other, Algorithm.registered[parse_spec(method.spec)[0]])
                loss_of(other, communicator.rank, 0).backward()
                optimizer.step()
                other.close()

    run_ranks(2, rank)


def test_variations_that_there_are_not_here() -> None:
    """A choice of other sockets goes on with the same exchange."""

    def rank(communicator: Communicator) -> None:
        model = Wide()
        algorithm = AutoTune(model, sgd(model), communicator=communicator, facts=SLOW)
        state = algorithm.algorithm_state_dict()
        found = dict(state["decisions"])
        found["search"][1], found["used"] = f"{SIGN}, sockets: 4", f"{SIGN}, sockets: 4"
        found["search"][0] = "chosen"
        algorithm.load_algorithm_state_dict({**state, "decisions": list(found.items())})
        assert (algorithm.search.current, algorithm.used) == (SIGN, SIGN)
        algorithm.close()

    run_ranks(2, rank)
