"""The momentum that follows rounds and ranks: against NumPy in float64, over checkpoints, and in what ranks send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import Algorithm, DiLoCo, SlowMo
from bagua_kernels.algorithms.local_steps.agreement import Agreement, lr_after, momentum_after
from bagua_kernels.comm import Communicator, LocalCommunicator, run_ranks
from bench.short_runs.ways import WAYS, Outer
from tests.algorithms import parts
from tests.algorithms.local_steps.common import Case, Tensors, normal, trained
from tests.grids import grid

SHAPES = ((9, 7), (5,), (40,))
ROUNDS = 18


def towards(rank: int, number: int) -> list[torch.Tensor]:
    """The pseudo-gradient of a rank in a round: something common, and noise whose size changes from round to round."""
    noise = (0.3, 0.8, 1.5)[number % 3]
    return [normal(s, 1, i) + noise * normal(s, 2 + rank, number, i) for i, s in enumerate(SHAPES)]


def starts(communicator: Communicator, kind: type[Algorithm], rounds: int = ROUNDS, **options: Any) -> list[np.ndarray]:
    """The outer parameters after each round, with pseudo-gradients that are given."""
    module = Tensors(*SHAPES)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    found = []
    with kind(module, optimizer, communicator=communicator, interval=1, **options) as model:
        for number in range(rounds):
            for parameter, difference in zip(module.parameters(), towards(communicator.rank, number), strict=True):
                parameter.grad = difference
            optimizer.step()
            model.wait()  # type: ignore[operator]
            found.append(np.concatenate([p.detach().double().numpy().ravel() for p in module.parameters()]))
    return found


def oracle(size: int, slow: bool) -> list[np.ndarray]:
    """The steps of `Agreement`, and those of DiLoCo or SlowMo, in float64."""
    start = np.concatenate([p.detach().double().numpy().ravel() for p in Tensors(*SHAPES).parameters()])
    memory, share, found = np.zeros_like(start), 0.0, []
    for number in range(ROUNDS):
        own = [np.concatenate([d.double().numpy().ravel() for d in towards(rank, number)]) for rank in range(size)]
        mean = sum(own) / size
        rate = 0.7 + 0.3 * min(max((share - 0.6) / 0.25, 0.0), 1.0)
        far = max(rate, 16 * share**2, size / 4)
        bound = number / (number + 1 + 50 / size)
        lr = max(rate, min(1.0, far / 3) * (1 - bound))
        momentum = max(0.0, min(1 - lr / far, bound, 0.8))
        if slow:
            lr, momentum = 1.0, max(0.0, 1 - 1 / min(far, 0.7 / (1 - bound), 2.0))
        memory = momentum * memory + mean
        start = start - lr * (memory if slow else mean + momentum * memory)
        square = sum(d @ d for d in own) / size
        share = min(1.0, max(0.0, (size * (mean @ mean) - square) / ((size - 1) * (mean @ mean))))
        found.append(start)
    return found


@grid(numel=[0, 1, 4095, 4096, 10_000])
def test_shares_of_long_vectors(numel: int) -> None:
    def share(communicator: Communicator) -> float:
        agreement = Agreement(communicator, 0)
        for number in range(2):
            for work in agreement.begin(0):
                work.wait()
            if number == 0:
                agreement.sent(1e-8 * vectors[communicator.rank])
                agreement.received(1e-8 * sum(vectors, torch.zeros(numel)) / 2)
        return agreement.share

    vectors = [normal((numel,), rank) + 1 for rank in range(2)]
    a, b = (v.double().numpy() for v in vectors)
    mean = (a + b) / 2
    expected = (2 * (mean @ mean) - (a @ a + b @ b) / 2) / (mean @ mean) if numel else 0.0
    found = run_ranks(2, share)
    assert found[0] == found[1] == pytest.approx(min(max(expected, 0.0), 1.0), abs=1e-5)


@grid(size=[2, 3, 4], kind=[DiLoCo, SlowMo], bucket_bytes=[1, 1 << 20])
def test_outer_parameters_are_the_oracles_on_all_ranks(size: int, kind: type[Algorithm], bucket_bytes: int) -> None:
    everyone = run_ranks(size, lambda c: starts(c, kind, bucket_bytes=bucket_bytes))
    for mine in everyone:
        assert all(np.array_equal(a, b) for a, b in zip(mine, everyone[0], strict=True))
    expected = oracle(size, kind is SlowMo)
    for number, (found, wanted) in enumerate(zip(everyone[0], expected, strict=True)):
        assert np.abs(found - wanted).max() < 1e-4 * (1 + np.abs(wanted).max()), number


@pytest.mark.parametrize("name", ["nesterov auto", "slow auto", "nesterov 0.7 0.5"])
def test_the_study_simulates_what_ranks_do(name: str) -> None:
    size, way = 3, WAYS[name]
    kind: type[Algorithm] = SlowMo if way.family == "slow" else DiLoCo
    options = {} if name.endswith("auto") else {"outer_lr": 0.7, "outer_momentum": 0.5}
    real = run_ranks(size, lambda c: starts(c, kind, **options))[0]
    begin = {f"p{i}": p.detach() for i, p in enumerate(Tensors(*SHAPES).parameters())}
    copies = {n: torch.stack([p] * size).contiguous() for n, p in begin.items()}
    outer = Outer([way], size, copies)
    for number in range(ROUNDS):
        for rank in range(size):
            for p, difference in zip(copies.values(), towards(rank, number), strict=True):
                p[rank] -= difference
        outer.step(1.0)
        found = np.concatenate([end[0].double().numpy() for end in outer.ends().values()])
        assert np.abs(found - real[number]).max() < 1e-3, number


def test_momentum_rises_with_rounds_with_agreement_and_with_ranks() -> None:
    assert momentum_after(1, 1.0, 0.7, 4) == 0.0
    assert momentum_after(1000, 1.0, 0.7, 4) == 0.8
    # Without agreement outer parameters go a fourth of the number of ranks.
    assert momentum_after(1000, 0.0, 0.7, 4) == pytest.approx(0.3)
    assert momentum_after(1000, 0.0, 0.7, 8) == pytest.approx(0.65)
    assert momentum_after(1000, 0.0, 1.0, 4) == 0.0
    by_round = [momentum_after(number, 0.9, 0.7, 4) for number in range(1, 60)]
    by_share = [momentum_after(100, share / 20, 0.7, 4) for share in range(21)]
    by_ranks = [momentum_after(20, 0.3, 0.7, ranks) for ranks in range(2, 20)]
    assert by_round == sorted(by_round)
    assert by_share == sorted(by_share)
    assert by_ranks == sorted(by_ranks)
    assert by_ranks[6:] == [by_ranks[6]] * 12


def test_outer_parameters_go_as_far_as_plain_means_where_momentum_is_still_small() -> None:
    # Ranks that disagree, and ranks that agree.
    for ranks in (2, 4, 30):
        assert [lr_after(number, 0.0, ranks) for number in (1, 10, 100)] == [0.7] * 3
        rates = [lr_after(number, 0.5, ranks) for number in range(1, 100)]
        assert rates[0] == 1.0
        assert rates == sorted(rates, reverse=True)
        assert rates[-1] == 0.7
        for number, lr in enumerate(rates, 1):
            momentum = momentum_after(number, 0.5, lr, ranks)
            assert lr / (1 - momentum) >= 1 - 1e-9, number
        assert lr_after(50, 1.0, ranks) == 1.0


def test_one_rank_alone_has_a_momentum_too() -> None:
    (found,) = run_ranks(1, starts, DiLoCo, 40)
    assert np.isfinite(found[-1]).all()
    agreement = Agreement(LocalCommunicator.alone(), first=0)
    momenta = []
    for _ in range(60):
        assert list(agreement.begin(0)) == []
        momenta.append(agreement.momentum(0.7))
    assert momenta[0] == 0.0
    assert momenta == sorted(momenta)
    assert momenta[-1] == 0.5


@grid(
    case={
        "streaming": Case(DiLoCo, {"fragments": 2, "delay": 1, "blend": 0.5}),
        "delayed": Case(DiLoCo, {"delay": 3, "codec": "absmax_int4", "min_numel": 0}),
        "slow": Case(SlowMo, {"bucket_bytes": 1}),
    },
    size=[2, 3],
)
def test_all_ranks_have_the_same_outer_parameters(case: Case, size: int) -> None:
    # Where they differ, all ranks raise.
    assert torch.isfinite(trained(case, size, 12, verify_every=1)).all()


def test_a_quorum_has_one_momentum_for_all_rounds() -> None:
    def rank(communicator: Communicator) -> bool:
        module = Tensors(*SHAPES)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        with DiLoCo(module, optimizer, communicator=communicator, interval=1, quorum=2) as model:
            return all(each.agreement is None for each in parts.outer_rounds(model).outer)

    assert run_ranks(2, rank) == [True, True]


def test_a_checkpoint_goes_on_with_the_same_bits() -> None:
    def rank(communicator: Communicator) -> None:
        module, other = Tensors(*SHAPES), Tensors(*SHAPES)
        models = []
        for net in (module, other):
            optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
            models.append(DiLoCo(net, optimizer, communicator=communicator, interval=1, bucket_bytes=1))

        def train(net: nn.Module, model: DiLoCo, begin: int, end: int) -> None:
            for number in range(begin, end):
                for parameter, difference in zip(net.parameters(), towards(communicator.rank, number), strict=True):
                    parameter.grad = difference
                model.local.optimizer.step()
                model.wait()

        train(module, models[0], 0, 7)
        models[1].load_algorithm_state_dict(models[0].algorithm_state_dict())
        for net, model in zip((module, other), models, strict=True):
            train(net, model, 7, 12)
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
        shares = [each.agreement for each in parts.outer_rounds(models[1]).outer]
        assert shares[0] is not None
        assert shares[0].rounds == 12
        assert 0 < shares[0].share < 1
        for model in models:
            model.close()

    run_ranks(3, rank)


def test_another_number_of_ranks_goes_on_where_the_earlier_ones_were() -> None:
    def save(communicator: Communicator) -> dict[str, Any]:
        module = Tensors(*SHAPES)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        with DiLoCo(module, optimizer, communicator=communicator, interval=1) as model:
            for number in range(9):
                for parameter, difference in zip(module.parameters(), towards(communicator.rank, number), strict=True):
                    parameter.grad = difference
                optimizer.step()
                model.wait()
            return model.algorithm_state_dict()

    states = run_ranks(2, save)

    def load(communicator: Communicator) -> tuple[int, float]:
        module = Tensors(*SHAPES)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        with DiLoCo(module, optimizer, communicator=communicator, interval=1) as model:
            model.load_algorithm_state_dict(states)
            agreement = parts.outer_rounds(model).outer[0].agreement
            assert agreement is not None
            return agreement.rounds, agreement.share

    found = run_ranks(3, load)
    assert found[0][0] == 9
    assert found[0][1] > 0
    assert len({*found}) == 1


def test_what_is_not_finite_is_no_agreement() -> None:
    def rank(communicator: Communicator) -> tuple[float, float]:
        module = Tensors((4,))
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        with DiLoCo(module, optimizer, communicator=communicator, interval=1) as model:
            for _ in range(3):
                next(module.parameters()).grad = torch.full((4,), torch.inf)
                optimizer.step()
                model.wait()
            agreement = parts.outer_rounds(model).outer[0].agreement
            assert agreement is not None
            return agreement.share, agreement.momentum(1.0)

    assert run_ranks(2, rank) == [(0.0, 0.0)] * 2
