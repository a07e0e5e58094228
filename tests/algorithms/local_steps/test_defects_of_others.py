"""What public implementations of local steps have got wrong, one test for each behaviour."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import DiLoCo, LocalSGD, OuterNesterov, SlowMo, SparseLoCo
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import ChunkedTopK
from tests import limits
from tests.algorithms import parts
from tests.algorithms.gossip.common import flat
from tests.algorithms.local_steps.common import ALL, Case, Tensors, normal, step
from tests.grids import grid

AVERAGE: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}


def test_outer_momentum_and_parameters_of_a_model_in_bfloat16_are_in_float32() -> None:
    """In the parameters' own dtype small outer steps are lost; and all of it is in a checkpoint."""

    def rank(communicator: Communicator) -> None:
        module = Tensors((64, 64), (5,), dtype=torch.bfloat16)
        for kind, keys in ((DiLoCo, {"start", "outer_momentum"}), (SlowMo, {"start", "slow_momentum"}),
                           (SparseLoCo, {"start", "residual"})):  # fmt: skip
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            with kind(module, optimizer, communicator=communicator, interval=1) as model:
                step(module, optimizer, communicator.rank)
                vectors = model.algorithm_state_dict()["vectors"]
                assert vectors.keys() == keys
                assert {each.dtype for named in vectors.values() for each in named.values()} == {torch.float32}
                assert all(any(each.any() for each in named.values()) for named in vectors.values())

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        (DiLoCo, "outer_lr", {"outer_momentum": 0.0}),
        (DiLoCo, "outer_lr", {"outer_momentum": 0.0, "codec": "sign", "exact": (), "min_numel": 0}),
        (DiLoCo, "outer_lr", {"outer_momentum": 0.0, "delay": 1, "fragments": 2}),
        (SlowMo, "slow_lr", {"slow_momentum": 0.0}),
        (SparseLoCo, "outer_lr", {"codec": ChunkedTopK(7, 32)}),
        (SparseLoCo, "outer_lr", {"codec": ChunkedTopK(7, 32), "reduce": "mean"}),
    ],
)
def test_an_outer_learning_rate_acts_once(kind: Any, name: str, options: dict[str, Any]) -> None:
    """Where it multiplies what enters the residual, too, it acts squared: the residual does not depend on it."""

    def rank(communicator: Communicator, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        module = Tensors((16, 16), (3, 33))
        nn.init.zeros_(module.p0)
        nn.init.zeros_(module.p1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with kind(module, optimizer, communicator=communicator, interval=4, **{name: rate}, **options) as model:
            for number in range(4):
                step(module, optimizer, communicator.rank, number)
            model.wait()
            starts = torch.cat([parts.start(model, bucket) for bucket in model.local.flat.buckets])
            vectors = parts.vectors(model)
        kept = [each for key in ("residual", "worker", "owner") for each in vectors.get(key, {}).values()]
        return starts, torch.cat([*kept, torch.zeros(1)])

    for (once, kept), (twice, also) in zip(*(run_ranks(2, rank, rate) for rate in (0.5, 1.0)), strict=True):
        assert once.any()
        assert torch.equal(2 * once, twice)
        assert torch.equal(kept, also)


def test_an_outer_learning_rate_around_one_optimizer_acts_once() -> None:
    def moved(rate: float) -> torch.Tensor:
        module = Tensors((5, 3))
        nn.init.zeros_(module.p0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with OuterNesterov(optimizer, interval=2, outer_lr=rate, outer_momentum=0.0):
            step(module, optimizer, 0)
            step(module, optimizer, 1)
        return flat(module)

    assert moved(1.0).any()
    assert torch.equal(2 * moved(0.5), moved(1.0))


NOT_FINITE = {
    "exact": Case(DiLoCo),
    "8 bits": Case(DiLoCo, {"codec": "minmax_uint8"}),
    "sign": Case(DiLoCo, {"codec": "sign"}),
    "topk": Case(DiLoCo, {"codec": "topk"}),
    "delayed": Case(DiLoCo, {"delay": 2}),
    "slow_mo": Case(SlowMo),
    "sparse_loco": Case(SparseLoCo, {"codec": ChunkedTopK(8, 64)}),
    "sparse_loco, dense": Case(SparseLoCo, {"dense": "absmax_int8"}),
    "sparse_loco, mean": Case(SparseLoCo, {"codec": ChunkedTopK(8, 64), "reduce": "mean"}),
}


@grid(case=NOT_FINITE, bad=[float("nan"), float("inf")], size=[2, 3, 5], cover=1)
def test_values_that_are_not_finite_on_one_rank_are_seen_by_all(case: Case, bad: float, size: int) -> None:
    """A rank that leaves out its own part, alone, has other parameters from then on. Other tensors go on."""

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor, float]:
        module = Tensors((64, 64), (40, 40), (3,))
        start = flat(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with case.make(module, optimizer, communicator, interval=4, bucket_bytes=1) as model:
            for number in range(4):
                step(module, optimizer, communicator.rank, number)
                if communicator.rank == 1 and number == 1:
                    with torch.no_grad():
                        module.p0[17, 5] = bad
            model.wait()
            norm = model.stats().residual_norm
            return torch.cat([parts.start(model, bucket) for bucket in model.local.flat.buckets]), start, norm

    everyone = run_ranks(size, rank)
    first, start, _ = everyone[0]
    for other, _, norm in everyone:
        assert torch.equal(other.nan_to_num(7e7), first.nan_to_num(7e7))
        assert norm < float("inf")  # nor is it kept
    assert not first.isfinite().all()
    others = first[-(40 * 40 + 3) :]
    assert others.isfinite().all()
    assert not torch.equal(others, start[-others.numel() :])


def sizes(*elements: int) -> tuple[tuple[int, ...], ...]:
    return tuple((n,) for n in elements)


MANY = sizes(1, 5, 9, 10, 11, 25, 2, 10, 1, 30, 3)


@grid(
    bucket_bytes=[1, 4, 36, 40, 44, 60, 100, 104, 400, 4 << 10],
    kind__options={
        "local_sgd": (LocalSGD, {}),
        "diloco": (DiLoCo, AVERAGE),
        "delayed": (LocalSGD, {"delay": 1}),
        "identity": (DiLoCo, {**AVERAGE, "codec": "identity", "exact": (), "min_numel": 0}),
    },
    cover=1,
)
def test_every_tensor_is_averaged_wherever_buckets_end(bucket_bytes: int, kind: Any, options: dict[str, Any]) -> None:
    """Where a tensor does not fit into a bucket, those behind it must not be left out, nor get the values of another."""

    def rank(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        module = Tensors(*MANY)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with kind(
            module, optimizer, communicator=communicator, interval=4, bucket_bytes=bucket_bytes, **options
        ) as model:
            for number in range(4):
                step(module, optimizer, communicator.rank, number)
            own = flat(module)
            model.wait()
        return own, flat(module)

    everyone = run_ranks(3, rank)
    mean = torch.stack([own.double() for own, _ in everyone]).mean(0)
    assert min(float((own - mean).abs().min()) for own, _ in everyone) > 1e-4
    for _, after in everyone:
        assert torch.allclose(after.double(), mean, atol=1e-6)


def test_the_first_outer_step_around_one_optimizer_goes_downhill() -> None:
    """On x^2 / 2 from 1. A pseudo-gradient of the other sign, which the optimizer then subtracts, goes uphill."""
    x = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([x], lr=0.05)
    with OuterNesterov(optimizer, interval=4):
        for _ in range(4):
            x.grad = x.detach().clone()
            optimizer.step()
    assert 0 < float(x.detach()) < 0.95**4


@grid(case=ALL, size=[2, 3, 4, 5, 8], cover=1)
def test_the_first_round_goes_downhill(case: Case, size: int) -> None:
    """On |x|^2 / 2 for each rank, in a tensor that codecs encode, and with the rates that users have by default."""

    def rank(communicator: Communicator) -> tuple[float, float]:
        module = Tensors((24, 32))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
        before = float(flat(module).square().sum())
        with case.make(module, optimizer, communicator, interval=4) as model:
            for _ in range(4 + getattr(model, "delay", 0)):
                module.p0.grad = module.p0.detach() * (1 + 0.5 * communicator.rank / size)
                optimizer.step()
            model.wait()
            start = torch.cat([parts.start(model, bucket) for bucket in model.local.flat.buckets])
        return before, float(start.square().sum())

    for before, after in run_ranks(size, rank):
        assert after < before


@pytest.mark.parametrize("delay", [0, 1])
def test_a_blend_leaves_outer_parameters_as_they_are(delay: int) -> None:
    """A merge in place into the outer parameters would move them towards those of one rank."""

    def rank(communicator: Communicator) -> None:
        module = Tensors((8, 8))
        begin = flat(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        options: dict[str, Any] = {**AVERAGE, "interval": 2, "delay": delay, "blend": 0.25}
        with DiLoCo(module, optimizer, communicator=communicator, **options) as model:
            step(module, optimizer, communicator.rank, 0)
            step(module, optimizer, communicator.rank, 1)
            if delay:
                step(module, optimizer, communicator.rank, 2)
            own = flat(module)
            model.wait()
            (start,) = (parts.start(model, bucket) for bucket in model.local.flat.buckets)
            steps = [normal((8, 8), 1, r, number).flatten() for r in range(2) for number in range(2)]
            assert torch.allclose(start, begin - 0.1 * torch.stack(steps).sum(0) / 2, atol=1e-6)
            assert torch.allclose(flat(module), 0.25 * own + 0.75 * start, atol=1e-6)

    run_ranks(2, rank)


@grid(
    cover=1,
    case={
        "exact": Case(LocalSGD),
        "sign": Case(DiLoCo, {"codec": "sign", "exact": (), "min_numel": 0}),
        "streaming": Case(DiLoCo, {"fragments": 2, "blend": 0.5, "codec": "absmax_int4", "exact": (), "min_numel": 0}),
        "sparse_loco": Case(SparseLoCo, {"codec": ChunkedTopK(8, 64)}),
    },
)
def test_steps_go_on_while_an_exchange_is_under_way(case: Case) -> None:
    """A delay that is only simulated hides nothing: rank 0 takes its next steps before rank 1 has come to the round."""
    gone_on = threading.Event()

    def rank(communicator: Communicator) -> bool:
        module = Tensors((48, 48), (48, 48), (5,))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with case.make(module, optimizer, communicator, interval=6, delay=2) as model:
            rounds = 6 // case.options.get("fragments", 1)
            for number in range(rounds - 1):
                step(module, optimizer, communicator.rank, number)
            if communicator.rank == 1:
                assert gone_on.wait(limits.seconds(60)), "rank 0 waits for rank 1, which has not come to the round yet"
            step(module, optimizer, communicator.rank, rounds)
            before = flat(module)
            for number in range(2):
                step(module, optimizer, communicator.rank, rounds + 1 + number)
            assert not torch.equal(flat(module), before)
            gone_on.set()
            before = flat(module)
            model.wait()
            return not torch.equal(flat(module), before)

    assert run_ranks(2, rank, timeout=limits.seconds(90)) == [True, True]


def test_results_of_a_delay_are_not_used_before_they_are_due() -> None:
    """Though they have arrived long ago, for ranks would use them at different steps."""

    def rank(communicator: Communicator) -> list[bool]:
        module = Tensors((8, 8))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        changed = []
        with LocalSGD(module, optimizer, communicator=communicator, interval=4, delay=3) as model:
            for number in range(8):
                step(module, optimizer, communicator.rank, number)
                communicator.barrier().wait()
                before = flat(module)
                with torch.no_grad():
                    parts.loop(model).at_forward(True)
                changed.append(not torch.equal(flat(module), before))
        return changed

    assert run_ranks(2, rank) == [[False] * 6 + [True, False]] * 2
