"""Steps that start from other values than the parameters': bit for bit those after a copy of the values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from bagua_kernels import optim
from bagua_kernels.compression import AbsMaxInt8
from bagua_kernels.optim import LAMB, SGD, Extras
from bagua_kernels.optim.step.starts import Starts
from tests.conftest import Target
from tests.grids import grid, only
from tests.optim.step.training import copied, make, parameters, params_of

Change = Callable[[list[nn.Parameter], list[torch.Tensor], int], None]


def starts_of(params: list[nn.Parameter], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(p.detach().cpu() + torch.randn(p.shape, generator=generator)).to(p.dtype).to(p.device) for p in params]


def give(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype).to(p.device)


def check(one: Optimizer, other: Optimizer, *, steps: int = 3, change: Change = lambda *_: None) -> None:
    """Compares steps from starts with steps after a copy, and lets the last step start from the parameters again."""
    for step in range(steps + 1):
        for each in (one, other):
            params = params_of(each)
            starts = starts_of(params, step)
            give(params, step)
            change(params, starts, step)
            if step < steps and each is one:
                each.start_from(dict(zip(params, starts, strict=True)))  # type: ignore[attr-defined]
            elif step < steps:
                with torch.no_grad():
                    for p, start in zip(params, starts, strict=True):
                        p.copy_(start)
            each.step()
        for p, q in zip(params_of(one), params_of(other), strict=True):
            assert torch.equal(p, q)
            for name, value in one.state[p].items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.state[q][name]))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values each step copied, if it copied any."""
    found: list[int] = []
    copy = Starts.copy

    def counted(starts: Starts) -> None:
        if starts._values:
            found.append(len(starts._values))
        copy(starts)

    monkeypatch.setattr(Starts, "copy", counted)
    return found


EXTRAS = {
    "none": Extras(),
    "stochastic": Extras(precision="stochastic", seed=3),
    "master": Extras(precision="master", average=0.5),
    "kahan": Extras(precision="kahan"),
}


@grid(
    kind=["adamw", "sgd", "sgd_momentum"],
    dtype__extras=only(
        [
            *[(dtype, Extras()) for dtype in (torch.float32, torch.float64, torch.float16, torch.complex64)],
            *[(torch.bfloat16, extras) for extras in EXTRAS.values()],
        ],
        (torch.float32, Extras()),
        (torch.bfloat16, EXTRAS["master"]),
    ),
    cover=1,
)
def test_as_after_a_copy(kind: str, dtype: torch.dtype, extras: Extras, copies: list[int]) -> None:
    mine = [nn.Parameter(p.detach().to(dtype)) for p in parameters()]
    check(make(kind, mine, extras), make(kind, copied(mine), extras))
    # In the first step, which makes states; without momentum also in the second one, which finds them.
    assert copies == ([3, 3] if kind == "sgd" and extras == Extras() else [3])


def test_on_every_backend(target: Target) -> None:
    mine = [nn.Parameter(p.detach().float().to(target.device)) for p in parameters()]
    check(SGD(mine, lr=0.1, momentum=0.9), SGD(copied(mine), lr=0.1, momentum=0.9))


def nothing(params: list[nn.Parameter], starts: list[torch.Tensor], step: int) -> None:
    pass


def without_a_gradient(params: list[nn.Parameter], starts: list[torch.Tensor], step: int) -> None:
    params[1].grad = None


def once_without_a_gradient(params: list[nn.Parameter], starts: list[torch.Tensor], step: int) -> None:
    params[1].grad = None if step == 1 else params[1].grad


def other_strides(params: list[nn.Parameter], starts: list[torch.Tensor], step: int) -> None:
    starts[0] = starts[0].t().contiguous().t()


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        (SGD, without_a_gradient, [3, 3, 1]),
        (SGD, once_without_a_gradient, [3, 3]),
        (SGD, other_strides, [3, 3, 3]),
        (LAMB, nothing, [3, 3, 3]),
    ],
)
def test_values_that_kernels_cannot_read_are_copied(
    kind: type[Optimizer], change: Change, expected: list[int], copies: list[int]
) -> None:
    mine = [nn.Parameter(p.detach().float()) for p in parameters()]
    options = {"lr": 0.1, "momentum": 0.9} if kind is SGD else {"lr": 0.1}
    check(kind(mine, **options), kind(copied(mine), **options), change=change)  # type: ignore[arg-type]
    assert copies == expected


def test_some_parameters(copies: list[int]) -> None:
    mine = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8, dtype=torch.float64))]
    optimizer = SGD(mine, lr=0.5)
    give(mine, 0)
    for _ in range(2):
        with torch.no_grad():
            mine[0].fill_(1.0)
        # No one else keeps the values alive.
        optimizer.start_from({mine[1]: torch.full((8,), 3.0, dtype=torch.float64)})
        optimizer.step()
        assert torch.equal(mine[0].detach(), 1 - 0.5 * mine[0].grad)
        assert torch.equal(mine[1].detach(), 3 - 0.5 * mine[1].grad)
    assert copies == [1]


def test_skipped_steps_start_there_too(copies: list[int]) -> None:
    """A step without gradients, and one whose gradients a scaler found to be infinite, leave the values that were to be used."""
    p = nn.Parameter(torch.ones(5))
    optimizer = SGD([p], lr=0.1)
    optimizer.start_from({p: torch.full((5,), 2.0)})
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((5,), 2.0))
    p.grad = torch.full((5,), float("inf"))
    optimizer.found_inf, optimizer.grad_scale = torch.ones(1), torch.ones(1)  # type: ignore[attr-defined]
    optimizer.start_from({p: torch.full((5,), 3.0)})
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((5,), 3.0))
    assert copies == [1, 1]


def test_other_ways_to_step(copies: list[int]) -> None:
    """PyTorch's own way, and steps from payloads, start there too."""
    p = nn.Parameter(torch.ones(64))
    optimizer = SGD([p], lr=0.5)
    p.grad = torch.ones(64).to_sparse()
    optimizer.start_from({p: torch.full((64,), 2.0)})
    optimizer.step()
    assert torch.equal(p.detach(), torch.full((64,), 1.5))
    p.grad = None
    codec = AbsMaxInt8()
    payload = codec.encode(torch.ones(64))[None]
    plain = SGD([p], lr=0.5)
    plain.start_from({p: torch.full((64,), 4.0)})
    plain.step_from_encoded(codec, {p: payload})
    assert torch.equal(p.detach(), torch.full((64,), 3.5))
    assert copies == [1, 1]


def test_wrong_starts() -> None:
    p = nn.Parameter(torch.ones(5))
    optimizer = optim.SGD([p], lr=0.1)
    with pytest.raises(ValueError, match="in no group"):
        optimizer.start_from({nn.Parameter(torch.ones(5)): torch.ones(5)})
    for wrong in (torch.ones(4), torch.ones(5, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"a start must be torch.float32 of shape \(5,\) on cpu"):
            optimizer.start_from({p: wrong})
