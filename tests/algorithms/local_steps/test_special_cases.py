"""Options with which local steps are another algorithm, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bagua_kernels.algorithms import DiLoCo, GradientAllReduce, LocalSGD, PostLocalSGD, SlowMo, SparseLoCo
from bagua_kernels.comm import Communicator, run_ranks
from bagua_kernels.compression import ChunkedTopK
from tests.algorithms import parts
from tests.algorithms.gossip.common import BUCKET_BYTES, Quadratic, Task, falling, flat
from tests.algorithms.local_steps.common import ALL, Case, trained
from tests.algorithms.ranks import Odd, batch
from tests.grids import grid, only

SIZES = [2, 3, 4, 5, 8]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
AVERAGE = {"outer_lr": 1.0, "outer_momentum": 0.0}


@grid(size=only(SIZES, 2, 3), dtype=DTYPES, codec=[None, "sign"], cover=1)
def test_one_fragment_without_delay_is_diloco(size: int, dtype: torch.dtype, codec: str | None) -> None:
    common: dict[str, Any] = {
        "dtype": dtype,
        "momentum": 0.5,
        "codec": codec,
        "exact": (),
        "min_numel": 0,
        "interval": 3,
    }
    expected = trained(Case(DiLoCo), size, 10, **common)
    assert (expected[-1] != expected[0]).any()
    assert torch.equal(trained(Case(DiLoCo, {"fragments": 1, "delay": 0, "blend": 0.0}), size, 10, **common), expected)


@grid(
    size=only(SIZES, 2, 5),
    case={
        "local_sgd": Case(LocalSGD, {"interval": 1}),
        "post_local_sgd": Case(PostLocalSGD, {"first_phase": 12, "interval": 5}),
        "slow_mo": Case(SlowMo, {"interval": 1, "slow_momentum": 0.0}),
        "diloco": Case(DiLoCo, {"interval": 1, **AVERAGE}),
    },
    momentum=[0.0, 0.9],
    cover=1,
)
def test_a_round_after_each_step_of_sgd_averages_gradients(size: int, case: Case, momentum: float) -> None:
    """All that SGD does is linear in gradients, momentum too. Within 1e-6 of the largest magnitude after twelve steps."""

    def rank(communicator: Communicator, kind: Any) -> torch.Tensor:
        module = Quadratic()
        task, optimizer = Task(flat(module).numel()), torch.optim.SGD(module.parameters(), lr=0.5, momentum=momentum)
        model = kind(module, optimizer, communicator=communicator)
        for step in range(12):
            optimizer.param_groups[0]["lr"] = falling(step)
            optimizer.zero_grad()
            task.loss(model, communicator.rank, step).backward()
            optimizer.step()
        model.close()
        return flat(module)

    expected, *_ = run_ranks(size, rank, GradientAllReduce)
    for found in run_ranks(size, rank, case.make):
        assert float((found - expected).abs().max()) <= 1e-6 * float(expected.abs().max())


@grid(
    kind=[torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad],
    dtype=[torch.float32, torch.float64, torch.bfloat16],
    cover=1,
)
def test_one_rank_alone_is_plain_pytorch(kind: Any, dtype: torch.dtype) -> None:
    """Where the outer step changes nothing: bit for bit, with weight decay, clipping and a schedule."""
    plain, rounds = Odd().to(dtype), [LocalSGD, PostLocalSGD, SparseLoCo]

    def train(module: nn.Module, model: Any, optimizer: Any) -> torch.Tensor:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(7):
            optimizer.zero_grad()
            model(batch(0, step).to(dtype)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            schedule.step()
        return flat(module)

    expected = train(plain, plain, kind(plain.parameters(), lr=0.05, weight_decay=0.1))

    def rank(communicator: Communicator) -> None:
        for each, options in [*((each, {}) for each in rounds), (DiLoCo, AVERAGE), (SlowMo, {"slow_momentum": 0.0})]:
            module = Odd().to(dtype)
            optimizer = kind(module.parameters(), lr=0.05, weight_decay=0.1)
            with each(module, optimizer, communicator=communicator, interval=2, **options) as model:
                assert torch.equal(train(module, model, optimizer), expected), each
                assert model.stats().bytes_sent == 0

    run_ranks(1, rank)


def stepped(communicator: Communicator, kind: Any, gradients: Any, **options: Any) -> torch.Tensor:
    """Rounds of steps of SGD with learning rate 1 from zeros, whose gradients are given by rank and step."""
    module = nn.Linear(96, 64, bias=False)
    nn.init.zeros_(module.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    with kind(module, optimizer, communicator=communicator, interval=2, **options) as model:
        for step in range(8):
            module.weight.grad = gradients(communicator.rank, step)
            optimizer.step()
            model.wait()
    return flat(module)


ALL_ELEMENTS: dict[str, Any] = {"codec": ChunkedTopK(64, 64), "beta": 0.0, "reduce": "mean"}


@grid(cover=1, size=only(SIZES, 3, 4))
def test_sparse_loco_that_sends_all_elements_averages(size: int) -> None:
    """Without a residual, and with differences that two magnitudes can hold: bit for bit where P is a power of two."""

    def gradient(rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * (step // 2) + rank)
        signs = torch.randint(0, 2, (64, 96), generator=generator) * 2.0 - 1
        large = torch.randint(0, 2, (64, 96), generator=generator)
        return signs * (2.0 ** -(2 + rank % 3) * (1 + 2 * large))

    sparse = run_ranks(size, lambda c: stepped(c, SparseLoCo, gradient, **ALL_ELEMENTS))
    plain = run_ranks(size, lambda c: stepped(c, LocalSGD, gradient))
    for found, expected in zip(sparse, plain, strict=True):
        assert expected.any()
        if size & (size - 1):
            assert torch.allclose(found, expected, atol=1e-6)
        else:
            assert torch.equal(found, expected)


@pytest.mark.parametrize("size", only(SIZES, 3))
def test_sparse_loco_that_sends_all_elements_is_close_to_averages(size: int) -> None:
    """Two magnitudes for each chunk lose at most 0.4 of the norm of normal values, and means of them no more."""

    def gradient(rank: int, step: int) -> torch.Tensor:
        return torch.randn(64, 96, generator=torch.Generator().manual_seed(100 * step + rank))

    (found, *_), (expected, *_) = (
        run_ranks(size, lambda c, kind=kind, options=options: stepped(c, kind, gradient, **options))
        for kind, options in ((SparseLoCo, ALL_ELEMENTS), (LocalSGD, {}))
    )
    assert 0 < float((found - expected).norm()) <= 0.4 * float(expected.norm())


@grid(case={name: case for name, case in ALL.items() if "delay" not in case.options}, size=SIZES, cover=1)
def test_a_rank_without_gradients_ends_with_the_bits_of_the_others(case: Case, size: int) -> None:
    """One has none at all, another zeros; their pseudo-gradients are zero."""

    def rank(communicator: Communicator) -> torch.Tensor:
        module = Odd()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = case.make(module, optimizer, communicator, interval=2, bucket_bytes=BUCKET_BYTES)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(batch(communicator.rank, step)).square().mean()
            if communicator.rank != 1:
                (loss * (communicator.rank != 2)).backward()
            optimizer.step()
        model.wait()
        starts = torch.cat([parts.start(model, bucket) for bucket in model.local.flat.buckets])
        model.close()
        return starts

    first, *others = run_ranks(size, rank)
    assert all(torch.equal(first, other) for other in others)
