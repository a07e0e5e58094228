"""The same exchange carried out otherwise, and what follows where anything may change."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels import algorithms, optim
from bagua_kernels.algorithms import Algorithm, AutoTune, ModelAlgorithm
from bagua_kernels.algorithms.choosing.cost.methods import methods
from bagua_kernels.algorithms.exchanges.exchange import Exchange
from bagua_kernels.algorithms.exchanges.repaying import owed_by
from bagua_kernels.comm import Communicator, Nodes, StripedCommunicator, run_ranks
from bagua_kernels.compression.codec import parse_spec
from tests.algorithms.choosing.tuned import FAST, SIGN, SLOW, Wide, force, sgd
from tests.algorithms.ranks import loss_of


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
    """Steps in backward and at its end, one exchange at a time and two, in buckets of all sizes; `grad` is None always."""

    def rank(communicator: Communicator) -> list[list[torch.Tensor]]:
        found = []
        for varies in (True, False):
            model = Wide()
            optimizer = optim.AdamW(model.parameters(), lr=0.05)
            algorithm = AutoTune(
                model, optimizer, communicator=communicator, exactness="exact", apply_in_backward=True, bucket_bytes=600
            )
            labels = list(algorithm.chooser.candidates)
            assert sum(", one at a time" in label for label in labels) == 3
            assert sum(", steps at the end" in label for label in labels) == 3
            assert all(label.startswith("GradientAllReduce") for label in labels)
            found.append(
                trained(algorithm, optimizer, labels if varies else labels[:1] * len(labels), communicator.rank)
            )
        return found

    everyone = run_ranks(2, rank)
    for found in everyone:
        assert all(torch.equal(a, b) for a, b in zip(found[0], everyone[0][1], strict=True))


def test_what_fits_is_gone_on_with() -> None:
    """Exchanges of a variation are the same; of another rank, they have the residuals of those before, and the same buckets."""

    def rank(communicator: Communicator) -> None:
        model = Wide()
        optimizer = optim.SGD(model.parameters(), lr=0.05)
        algorithm = AutoTune(model, optimizer, communicator=communicator, apply_in_backward=True)
        engine = algorithm._engine
        assert engine is not None
        label = {rank: f"PowerSGD {rank}, 0.0056 MiB" for rank in (1, 4)}

        def step_with(candidate: str) -> tuple[list[Exchange], dict[str, torch.Tensor]]:
            force(algorithm, candidate)
            owed = {name: owes.clone() for name, owes in owed_by(engine.buckets.state()).items()}
            optimizer.zero_grad()
            loss_of(algorithm, communicator.rank, 0).backward()
            optimizer.step()
            return list(engine.buckets.exchanges), owed

        first, _ = step_with(label[1])
        step_with(label[1])
        owed = owed_by(engine.buckets.state())
        assert any(bool(owes.any()) for owes in owed.values())
        varied, handed = step_with(f"{label[1]}, steps at the end")
        assert all(a is b for a, b in zip(first, varied, strict=True))
        assert all(torch.equal(handed[name], owed[name]) for name in owed)
        owed = owed_by(engine.buckets.state())
        other, handed = step_with(label[4])
        assert all(a.bucket is b.bucket for a, b in zip(first, other, strict=True))
        for name, owes in owed.items():
            torch.testing.assert_close(handed[name], owes)
        algorithm.close()

    run_ranks(2, rank)


def test_means_by_nodes_are_a_candidate() -> None:
    def rank(communicator: Communicator) -> list[list[torch.Tensor]]:
        found = []
        for varies in (True, False):
            model = Wide()
            optimizer = sgd(model)
            algorithm = AutoTune(
                model, optimizer, communicator=communicator, exactness="exact", nodes=[[0, 2], [1, 3]], bucket_bytes=600
            )
            labels = [label for label in algorithm.chooser.candidates if ", by nodes" in label]
            assert len(labels) == 2  # one of them with one exchange at a time
            labels = [*labels, algorithm.search.plain] if varies else [algorithm.search.plain] * 3
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


def test_a_scaler_goes_along() -> None:
    """After the hand-over one rank alone may leave out a step."""

    def rank(communicator: Communicator) -> int:
        model = Wide()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        first = AutoTune(
            model, optimizer, communicator=communicator, facts=SLOW, exactness="any", scaler=scaler, bucket_bytes=600
        )
        force(first, first.search.plain)
        assert "SGP" in first.elsewhere
        assert not any(name.startswith(("LocalSGD", "DiLoCo")) for name in first.elsewhere)
        first.chooser.elsewhere = {"Decentralized": 1e-9}
        algorithm = first.settled()
        assert isinstance(algorithm, ModelAlgorithm)
        for step in range(20):
            optimizer.zero_grad()
            loss = loss_of(algorithm, communicator.rank, step)
            scaler.scale(loss * (float("inf") if step == 3 and communicator.rank else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        algorithm.synchronize()
        steps = algorithm.stats().steps
        algorithm.close()
        return steps

    first, second = run_ranks(2, rank)
    assert first == second


@pytest.mark.parametrize(("name", "compares"), [("DiLoCo 30", True), ("Decentralized", False)])
def test_ranks_are_compared_after_the_hand_over(name: str, compares: bool) -> None:
    """Or a warning is given, where they have nothing in common any more."""

    def rank(communicator: Communicator) -> None:
        model = Wide()
        first = AutoTune(
            model, sgd(model), communicator=communicator, facts=SLOW, exactness="any", bucket_bytes=600, verify_every=7
        )
        force(first, first.search.plain)
        assert name in first.elsewhere
        first.chooser.elsewhere = {name: 1e-9}
        followers.append(first.settled())
        assert followers[-1].verify_every == (7 if compares else None)
        followers[-1].close()

    followers: list[Algorithm] = []
    if compares:
        run_ranks(2, rank)
    else:
        with pytest.warns(RuntimeWarning, match="Decentralized follows, and ranks are no longer compared"):
            run_ranks(2, rank)
    assert len(followers) == 2


def test_a_resumed_run_is_handed_over() -> None:
    """Also between signs and the exact step that pays for them, which loses nothing."""

    def rank(communicator: Communicator) -> None:
        model, other = Wide(), Wide()
        optimizer = sgd(other)
        whole = AutoTune(model, sgd(model), communicator=communicator, facts=SLOW, exactness="any")
        again: Algorithm = AutoTune(other, optimizer, communicator=communicator, exactness="any")
        assert isinstance(again, AutoTune)
        force(whole, SIGN)
        for step in range(3):
            whole.zero_grad()
            loss_of(whole, communicator.rank, step).backward()
        assert whole._engine is not None
        owed = owed_by(whole._engine.buckets.state())
        assert whole.settled() is whole
        again.load_algorithm_state_dict(whole.algorithm_state_dict())
        assert again._engine is not None
        found = owed_by(again._engine.buckets.state())
        assert all(torch.equal(found[name], owed[name]) for name in owed)
        assert again.settled() is again
        optimizer.zero_grad()
        loss_of(again, communicator.rank, 3).backward()
        again = again.settled()
        assert isinstance(again, ModelAlgorithm)
        again.close()
        whole.close()

    run_ranks(2, rank)


def test_what_is_frozen_is_not_waited_for() -> None:
    def rank(communicator: Communicator) -> None:
        model = Wide()
        algorithm: Algorithm = AutoTune(model, sgd(model), communicator=communicator, facts=SLOW, exactness="any")
        assert isinstance(algorithm, AutoTune)
        force(algorithm, SIGN)
        for step in range(4):
            if step == 3:
                model.second.requires_grad_(False)
                algorithm.settled()
            algorithm.zero_grad()
            loss_of(algorithm, communicator.rank, step).backward()
        # The choice itself stays what it was.
        assert algorithm.search.current == SIGN
        algorithm = algorithm.settled()
        assert isinstance(algorithm, ModelAlgorithm)
        algorithm.close()

    run_ranks(2, rank)


def test_another_order_of_buckets_keeps_what_is_owed() -> None:
    def rank(communicator: Communicator) -> None:
        model = Wide()
        algorithm = AutoTune(model, sgd(model), communicator=communicator)
        force(algorithm, SIGN)
        for step in range(2):
            algorithm.zero_grad()
            loss_of(algorithm, communicator.rank, step).backward()
        engine = algorithm._engine
        assert engine is not None
        owed = owed_by(engine.buckets.state())
        force(algorithm, algorithm.search.plain)
        engine.lay_out(engine.buckets.order[::-1], engine.buckets.state())
        found = owed_by(engine.buckets.state())
        assert owed.keys() == found.keys()
        assert all(torch.equal(found[name], owed[name]) for name in owed)
        algorithm.close()

    run_ranks(2, rank)


def test_nodes_that_cannot_be_found(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Exact means by nodes are one candidate of many."""

    def lost(communicator: Communicator) -> None:
        raise ValueError("the nodes cannot be found")

    monkeypatch.setattr(Nodes, "find", lost)

    def rank(communicator: Communicator) -> None:
        model = Wide()
        algorithm = AutoTune(model, sgd(model), communicator=communicator)
        assert not any("by nodes" in label for label in algorithm.chooser.candidates)
        algorithm.close()

    run_ranks(2, rank)
    assert [record.getMessage() for record in caplog.records] == [
        "ranks of a node do not average first: the nodes cannot be found"
    ]


def test_every_algorithm_of_another_class_can_follow() -> None:
    def rank(communicator: Communicator) -> None:
        for method in methods():
            if method.exactness == "any":
                model = Wide()
                optimizer = sgd(model)
                first = AutoTune(model, optimizer, communicator=communicator, facts=SLOW, exactness="any")
                force(first, first.search.plain)
                first.chooser.elsewhere = {method.name: 1e-9}
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
        assert (algorithm.search.current, algorithm.chooser.used.label) == (SIGN, SIGN)
        algorithm.close()

    run_ranks(2, rank)
