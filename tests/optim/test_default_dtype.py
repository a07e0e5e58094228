"""`torch.set_default_dtype` is the user's: no optimizer's results depend on it, and counters have torch's dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bagua_kernels import optim
from bagua_kernels.compression import AbsMaxInt8
from bagua_kernels.optim.step.part import Part
from bagua_kernels.optim.watch import sweep
from tests.grids import grid, only

SHAPES = [(3, 5), (1, 1), (130, 2)]
# Some of those that have a counter, a flag that no state has, or neither; and all that are not torch's.
MAKES: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda p, **o: optim.SGD(p, lr=0.05, momentum=0.9, **o),
    "Adam": lambda p, **o: optim.Adam(p, lr=0.05, amsgrad=True, **o),
    "AdamW": lambda p, **o: optim.AdamW(p, lr=0.05, **o),
    "NAdam": lambda p, **o: optim.NAdam(p, lr=0.05, **o),
    "RAdam": lambda p, **o: optim.RAdam(p, lr=0.05, **o),
    "Adamax": lambda p, **o: optim.Adamax(p, lr=0.05, **o),
    "Adagrad": lambda p, **o: optim.Adagrad(p, lr=0.05, **o),
    "Adadelta": lambda p, **o: optim.Adadelta(p, lr=1.0, **o),
    "RMSprop": lambda p, **o: optim.RMSprop(p, lr=0.05, momentum=0.9, centered=True, **o),
    "Rprop": lambda p, **o: optim.Rprop(p, lr=0.05, **o),
    "ASGD": lambda p, **o: optim.ASGD(p, lr=0.05, t0=2, **o),
    "LAMB": lambda p, **o: optim.LAMB(p, lr=0.05, **o),
    "LARS": lambda p, **o: optim.LARS(p, lr=1.0, **o),
    "Lion": lambda p, **o: optim.Lion(p, lr=0.05, **o),
    "rule": lambda p, **o: DECAYING(p, lr=0.05, **o),
}
if hasattr(torch.optim, "Muon"):
    MAKES["Muon"] = lambda p, **o: optim.Muon(p, lr=0.05, **o)


def decaying(p: Any, g: Any, m: Any, lr: Any, step: Any) -> Any:
    m = m + g
    return p - lr * m / step, m


DECAYING = optim.rule_optimizer("Decaying", decaying, state={"m": 0.0}, defaults={"lr": 0.1})


DEFAULTS = [torch.bfloat16, torch.float16, torch.float64]


every_default = grid(cover=1, set_default=DEFAULTS, indirect=["set_default"])


@pytest.fixture
def set_default(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(before)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float32).to(dtype)) for s in SHAPES]


def train(params: list[nn.Parameter], optimizer: Optimizer, steps: int = 6, clip: bool = True) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for i, p in enumerate(params):
            gradient = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p.dtype)
            p.grad = None if i == step % 3 and step else gradient
        if clip:
            optimizer.clip_grad_norm_(0.5)  # type: ignore[attr-defined]
        optimizer.step()


def results(name: str, dtype: torch.dtype, extras: optim.Extras | None) -> tuple[list[nn.Parameter], Optimizer]:
    params = parameters(dtype)
    optimizer = MAKES[name](params, extras=extras)
    train(params, optimizer)
    # A checkpoint is taken up again.
    again = MAKES[name](params, extras=extras)
    again.load_state_dict(optimizer.state_dict())
    train(params, again)
    return params, again


HALF = [
    (torch.bfloat16, optim.Extras(precision="stochastic")),
    (torch.bfloat16, optim.Extras(precision="kahan")),
    (torch.bfloat16, optim.Extras(precision="master", average=0.9)),
]


@grid(
    name__dtype__extras=[
        *((name, torch.float32, None) for name in MAKES),
        *only([("LAMB", *half) for half in HALF], ("LAMB", *HALF[2])),
    ],
    cover=1,
)
@every_default
def test_results(name: str, dtype: torch.dtype, extras: optim.Extras | None, set_default: Callable[[], None]) -> None:
    expected, reference = results(name, dtype, extras)
    set_default()
    params, optimizer = results(name, dtype, extras)
    counters = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    for p, q in zip(params, expected, strict=True):
        # Products and rates that are counted have more digits under float64.
        exact = counters == torch.float32 or name not in ("NAdam", "ASGD")
        torch.testing.assert_close(p, q, rtol=0.0 if exact else 1e-2, atol=0.0 if exact else 1e-6)
        for key, value in reference.state[q].items():
            assert optimizer.state[p][key].dtype == (counters if key == "step" else value.dtype), key


@every_default
@grid(cover=1, name=[n for n in MAKES if hasattr(torch.optim, n)])
def test_checkpoints_of_torch(name: str, set_default: Callable[[], None]) -> None:
    """In both directions, and states of the same dtypes."""
    set_default()
    arguments = {k: v for k, v in MAKES[name](parameters()).param_groups[0].items() if k != "params"}
    kind = getattr(torch.optim, name)
    arguments = {k: v for k, v in arguments.items() if k in kind.__init__.__code__.co_varnames}
    first, second = parameters(), parameters()
    ours, theirs = MAKES[name](first), kind(second, **arguments)
    train(first, ours, clip=False)
    train(second, theirs, clip=False)
    dtypes = [
        [{k: v.dtype for k, v in o.state[p].items() if isinstance(v, Tensor)} for p in params]
        for o, params in ((ours, first), (theirs, second))
    ]
    assert dtypes[0] == dtypes[1]
    ours.load_state_dict(theirs.state_dict())
    again = kind(second, **arguments)
    again.load_state_dict(ours.state_dict())
    train(second, again, clip=False)
    with torch.no_grad():
        for p, q in zip(first, second, strict=True):
            assert p.dtype == q.dtype == torch.float32


@every_default
def test_many_steps_are_counted(set_default: Callable[[], None]) -> None:
    """Bfloat16 would count to 256, float16 to 2048."""
    set_default()
    p = nn.Parameter(torch.ones(1, dtype=torch.float32))
    optimizer = optim.LAMB([p])
    p.grad = torch.ones(1, dtype=torch.float32)
    for _ in range(2100):
        optimizer.step()
    assert float(optimizer.state[p]["step"]) == 2100


@every_default
def test_encoded_gradients_and_parts(set_default: Callable[[], None]) -> None:
    def trained() -> list[Tensor]:
        params, codec = parameters(), AbsMaxInt8()
        optimizer = optim.AdamW(params, lr=0.1)
        train(params, optimizer)
        part = Part(optimizer, params[1:])
        for p in params:
            p.grad = torch.ones_like(p)
        part.step()
        optimizer.step_from_encoded(codec, {p: codec.encode(torch.ones_like(p).flatten())[None] for p in params})
        return [p.detach().clone() for p in params]

    expected = trained()
    set_default()
    assert all(map(torch.equal, trained(), expected))


@every_default
@grid(cover=1, name=["SGD", "AdamW", "RMSprop", "NAdam"])
def test_fused_by_flat_tensors(name: str, set_default: Callable[[], None]) -> None:
    def trained(fuse: bool) -> list[Tensor]:
        params = parameters()
        optimizer = getattr(torch.optim, name)(params, lr=0.05)
        train(params, optim.fuse_optimizer(optimizer) if fuse else optimizer, clip=False)
        return [p.detach() for p in params]

    set_default()
    assert all(map(torch.equal, trained(True), trained(False)))


@every_default
def test_fields_are_measured_alike(set_default: Callable[[], None]) -> None:
    """What is known of tensors' memory must not depend on the default when it is first asked for."""
    expected = sweep.fields.__wrapped__()
    set_default()
    assert sweep.fields.__wrapped__() == expected
