"""Steps counted on a GPU: the same arithmetic in tensors, here on tensors of the CPU."""

from __future__ import annotations

import pytest
import torch

from bagua_kernels import optim
from bagua_kernels.optim.step.launch import Launch
from tests.grids import one_of_each, only
from tests.optim.cases import CASES, Case

COUNTING = one_of_each(
    [case for case in CASES if case.optimizer != "Muon"],
    lambda case: case.optimizer,
    lambda case: case.name,
    lambda case: (case.optimizer, "weight_decay" in case.arguments),
    cover=1,
)


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(300,), (7, 5), (1,)]]


def give_gradients(step: int, *several: list[torch.nn.Parameter]) -> None:
    for params in several:
        generator = torch.Generator().manual_seed(100 + step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)


# Each compiles a kernel of its own.
@pytest.mark.parametrize("case", only(COUNTING, *[case for case in COUNTING if isinstance(case, Case)][::4]), ids=str)
def test_same_steps_as_counted_on_the_host(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = parameters(), parameters()
    on_device, on_host = (getattr(optim, case.optimizer)(p, **case.options()) for p in (mine, other))
    for step in range(8):
        give_gradients(step, mine, other)
        on_host.step()
        with monkeypatch.context() as patch:
            patch.setattr(Launch, "on_device", property(lambda launch: bool(launch.counters)))
            on_device.step()
        for p, q in zip(mine, other, strict=True):
            torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-7)
            for key, value in on_host.state[q].items():
                torch.testing.assert_close(on_device.state[p][key], value, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["Adam", "NAdam", "ASGD", "SGD"])
def test_infinite_gradients_skip_without_asking(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict stays a tensor: nothing is read from it on the host."""
    monkeypatch.setattr(Launch, "on_device", property(lambda launch: bool(launch.counters)))
    options = {"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {}
    mine, other = parameters(), parameters()
    skipping, plain = (getattr(optim, name)(p, lr=0.1, **options) for p in (mine, other))
    for step in range(6):
        give_gradients(step, mine, other)
        bad = step in (0, 3)
        for p in mine:
            p.grad.mul_(1024.0)
        skipping.grad_scale = torch.tensor(1024.0)
        skipping.found_inf = torch.tensor(float(bad))
        if bad:
            mine[0].grad[0] = torch.inf
        else:
            plain.step()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "item", lambda tensor: pytest.fail("waits for the device"))
            skipping.step()
    for p, q in zip(mine, other, strict=True):
        assert torch.equal(p, q)
        for key, value in plain.state[q].items():
            torch.testing.assert_close(skipping.state[p][key], value, rtol=1e-6, atol=0)
