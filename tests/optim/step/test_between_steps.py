"""What happens around steps: skipped ones, failing ones, gradients that come and go, and what is kept alive."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from bagua_kernels import knobs, optim
from bagua_kernels.compression import AbsMaxInt8
from bagua_kernels.optim.step.fused import Fused
from bagua_kernels.optim.step.part import Part
from bagua_kernels.optim.watch.sweep import FEWEST
from tests.grids import grid, only

MANY = FEWEST + 6


def parameters(count: int = 3, size: int = 40) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator)) for _ in range(count)]


def give(params: list[nn.Parameter], seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def alike(mine: list[nn.Parameter], other: list[nn.Parameter]) -> None:
    for p, q in zip(mine, other, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_gradients_that_return_to_an_old_place() -> None:
    """In another layout of the same elements, which makes the quick check give way to the thorough one."""
    mine, other = ([nn.Parameter(torch.ones(8, 1)) for _ in range(MANY)] for _ in range(2))
    ours, theirs = optim.SGD(mine, lr=0.1), torch.optim.SGD(other, lr=0.1)
    first, second = ([torch.full((8, 1), v) for _ in mine] for v in (1.0, 2.0))
    for step, gradients in enumerate((first, first, second, first)):
        for p, q, g in zip(mine, other, gradients, strict=True):
            p.grad = g.as_strided((8, 1), (1, 8)) if step == 3 else g
            q.grad = g
        ours.step()
        theirs.step()
    alike(mine, other)


@grid(name=only(["AdamW", "SGD", "LAMB", "LARS"], "SGD", "LAMB"), count=[3, MANY], cover=1)
def test_gradients_that_come_and_go(name: str, count: int) -> None:
    mine, other = parameters(count), parameters(count)
    options = {"momentum": 0.9, "dampening": 0.3} if name == "SGD" else {}
    ours = getattr(optim, name)(mine, lr=0.1, **options)
    apart = [getattr(optim, name)([p], lr=0.1, **options) for p in other]
    launches = set()
    for step in range(6):
        give(mine, step)
        give(other, step)
        for i, (p, q) in enumerate(zip(mine, other, strict=True)):
            if step and (i + step) % 3 == 0:
                p.grad = q.grad = None
        ours.step()
        for optimizer in apart:
            optimizer.step()
        launches.add(id(ours._launches))
    alike(mine, other)
    for p, q, optimizer in zip(mine, other, apart, strict=True):
        assert ours.state[p].get("step") == optimizer.state[q].get("step")
    if name != "LARS":
        assert len(launches) == 1


def reset(state: dict[str, torch.Tensor]) -> None:
    """Replaces the counter by a new tensor, with the same `id` if that was given back."""
    old = id(state.pop("step"))
    made = [torch.tensor(0.0)]
    while id(made[-1]) != old and len(made) < 100:
        made.append(torch.tensor(0.0))
    state["step"] = made[-1]


def move(state: dict[str, torch.Tensor]) -> None:
    """Gives the same tensor other memory."""
    state["step"].data = torch.tensor(0.0)


@grid(cover=1, count=[1, 3, MANY], change=[reset, move])
def test_counter_that_is_replaced(count: int, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    mine, other = parameters(count), parameters(count)
    ours, theirs = optim.AdamW(mine, lr=0.1), torch.optim.AdamW(other, lr=0.1)
    for step in range(12):
        give(mine, step)
        give(other, step)
        ours.step()
        theirs.step()
        if step % 2:
            for optimizer, params in ((ours, mine), (theirs, other)):
                change(optimizer.state[params[step % count]])
        alike(mine, other)
    assert [float(ours.state[p]["step"]) for p in mine] == [float(theirs.state[p]["step"]) for p in other]


@grid(cover=1, name=["exp_avg", "exp_avg_sq"], count=[3, MANY])
def test_state_that_is_replaced(name: str, count: int) -> None:
    mine, other = parameters(count), parameters(count)
    ours, theirs = optim.AdamW(mine, lr=0.1), torch.optim.AdamW(other, lr=0.1)
    for step in range(12):
        give(mine, step)
        give(other, step)
        ours.step()
        theirs.step()
        for optimizer, params in ((ours, mine), (theirs, other)):
            state = optimizer.state[params[step % count]]
            del state[name]
            state[name] = torch.full((40,), 0.5)
        alike(mine, other)


def test_two_plans_of_the_same_parameters() -> None:
    """A part's plan moves all counters into a tensor of its own; the other's must notice, whatever was freed meanwhile."""
    params, twins = parameters(12, 3), parameters(12, 3)
    ours, theirs = optim.AdamW(params, lr=0.1), torch.optim.AdamW(twins, lr=0.1)
    members = [range(6), range(6, 12), range(12)]
    parts = [Part(ours, [params[i] for i in chosen]) for chosen in members]
    chooser = random.Random(0)
    for step in range(100):
        give(params, step)
        give(twins, step)
        which = chooser.randrange(3)
        for i, (p, q) in enumerate(zip(params, twins, strict=True)):
            if i not in members[which] or chooser.random() < 0.3:
                p.grad = q.grad = None
        parts[which].step()
        theirs.step()
        counts = [[float(o.state[p].get("step", 0)) for p in ps] for o, ps in ((ours, params), (theirs, twins))]
        assert counts[0] == counts[1]
    alike(params, twins)


def test_a_part_marks_what_it_updates_only() -> None:
    """Autograd may have saved the others for a backward pass to come."""
    used, unused = parameters(2)
    part = Part(optim.AdamW([used, unused]), [used, unused])
    give([used, unused])
    part.step()
    versions = used._version, unused._version
    unused.grad = None
    part.step()
    assert used._version > versions[0]
    assert unused._version == versions[1]


def test_no_gradient_is_freed_while_a_kernel_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters(MANY)
    optimizer = optim.SGD(params, lr=0.1)
    for step in range(3):
        give(params, step)
        optimizer.step()
    alive: list[bool] = []

    def launch(self: Fused, launch: object, rows: object, keys: object) -> None:
        gradients = [weakref.ref(p.grad) for p in params]
        for p in params:
            p.grad = None
        alive.append(all(r() is not None for r in gradients))

    monkeypatch.setattr(Fused, "_launch", launch)
    give(params)
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait)
    thread.start()
    try:
        optimizer.step()
    finally:
        waiting.set()
        thread.join()
    assert alive == [True]


@pytest.mark.usefixtures("small_heap")
@grid(cover=1, count=[3, MANY])
def test_nothing_is_kept_alive(count: int) -> None:
    params = parameters(count)
    optimizer = optim.AdamW(params)
    for skip in (0.0, 0.0, 0.0, 1.0):
        give(params)
        optimizer.found_inf = torch.tensor(skip)
        optimizer.step()
        del optimizer.found_inf
        gradients = [weakref.ref(p.grad) for p in params]
        optimizer.zero_grad()
        gc.collect()
        assert not any(r() is not None for r in gradients)
    states = [weakref.ref(optimizer.state[p]["exp_avg"]) for p in params]
    for p in params:
        optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].clone()
    gc.collect()
    assert not any(r() is not None for r in states)


class TestSkippedSteps:
    def test_first_momentum_is_still_the_gradient(self) -> None:
        mine, other = parameters(), parameters()
        ours = optim.SGD(mine, lr=0.1, momentum=0.9, dampening=0.5)
        theirs = torch.optim.SGD(other, lr=0.1, momentum=0.9, dampening=0.5)
        give(mine)
        ours.found_inf = torch.ones(())
        ours.step()
        del ours.found_inf
        assert not ours.state
        ours.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        for step in range(2):
            give(mine, step)
            give(other, step)
            ours.step()
            theirs.step()
        alike(mine, other)

    @pytest.mark.filterwarnings("ignore:.*sparse:UserWarning")
    def test_left_to_torch(self) -> None:
        mine, other = parameters(), parameters()
        pair = [(optim.SGD, mine), (torch.optim.SGD, other)]
        optimizers = [cls(p, lr=0.1, momentum=0.9, dampening=0.5) for cls, p in pair]
        for step in range(3):
            give(mine, step)
            give(other, step)
            for params in (mine, other):
                params[0].grad = params[0].grad.to_sparse()
            kept = mine[1].grad.clone()
            if step == 0:
                optimizers[0].clip_grad_norm_(1e9)
            for optimizer in optimizers:
                optimizer.step()
            assert torch.equal(mine[1].grad, kept)
        alike(mine[1:], other[1:])


class Failing(optim.SGD):
    def _advance(self, group, counters):
        if group["lr"] == 7.0:
            raise RuntimeError("no such rate")
        return super()._advance(group, counters)


def test_an_error_leaves_everything_as_it_was() -> None:
    params = parameters(4)
    optimizer = Failing([{"params": params[:2]}, {"params": params[2:], "lr": 0.2}], lr=0.1, momentum=0.9)
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[1]["lr"] = 7.0
    give(params)
    with pytest.raises(RuntimeError, match="no such rate"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert not optimizer.state
    optimizer.param_groups[1]["lr"] = 0.2
    optimizer.step()
    for p, b, lr in zip(params, before, (0.1, 0.1, 0.2, 0.2), strict=True):
        torch.testing.assert_close(p.detach(), b - lr * p.grad)


class TestClipping:
    @pytest.fixture
    def clipped(self) -> Iterator[tuple[optim.SGD, nn.Parameter]]:
        p = nn.Parameter(torch.zeros(4))
        optimizer = optim.SGD([p], lr=1.0)
        p.grad = torch.ones(4)
        optimizer.clip_grad_norm_(1e-3)
        yield optimizer, p
        p.grad = torch.ones(4)
        optimizer.step()
        assert torch.equal(p, -torch.ones(4))

    def test_ends_with_the_gradients(self, clipped: tuple[optim.SGD, nn.Parameter]) -> None:
        clipped[0].zero_grad()

    def test_ends_with_a_step_that_fails(self, clipped: tuple[optim.SGD, nn.Parameter]) -> None:
        def fails() -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            clipped[0].step(fails)

    def test_gradient_without_memory(self) -> None:
        p = nn.Parameter(torch.zeros(3))
        p.grad = torch._efficientzerotensor((3,))
        assert optim.SGD([p]).clip_grad_norm_(1.0) == 0


class TestEncoded:
    def test_hooks_find_no_gradient(self) -> None:
        p = nn.Parameter(torch.ones(256))
        optimizer = optim.SGD([p], lr=0.1)
        found = []
        optimizer.register_step_pre_hook(lambda *_: found.append(p.grad))
        optimizer.step_from_encoded(AbsMaxInt8(), {p: AbsMaxInt8().encode(torch.ones(256))[None]})
        assert found == [None]
        torch.testing.assert_close(p.detach(), torch.full((256,), 0.9))

    def test_wrong_payload_changes_nothing(self) -> None:
        codec = AbsMaxInt8()
        p, q = nn.Parameter(torch.ones(256)), nn.Parameter(torch.ones(256))
        optimizer = optim.AdamW([p, q])
        payload = codec.encode(torch.ones(256))[None]
        with pytest.raises(ValueError, match="payloads must have shape"):
            optimizer.step_from_encoded(codec, {p: payload, q: payload[:, :-1]})
        differentiable = optim.AdamW([{"params": [p]}, {"params": [q], "differentiable": True}])
        with pytest.raises(RuntimeError, match="cannot step from encoded"):
            differentiable.step_from_encoded(codec, {p: payload})
        assert torch.equal(p, torch.ones(256))
        assert not optimizer.state
        assert not differentiable.state


def test_checkpoint_that_a_hook_unwraps() -> None:
    p = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    extras = optim.Extras(precision="master")
    optimizer = optim.AdamW([p], extras=extras)
    p.grad = torch.ones_like(p)
    optimizer.step()
    again = optim.AdamW([p], extras=extras)
    again.register_load_state_dict_pre_hook(lambda _, wrapped: wrapped["optimizer"])
    seen = []
    again.register_load_state_dict_post_hook(lambda o: seen.append(o.state[p]["master"].dtype))
    again.load_state_dict({"optimizer": optimizer.state_dict()})
    assert seen == [torch.float32]
    assert torch.equal(again.state[p]["master"], optimizer.state[p]["master"])


def test_master_copy_follows_what_is_written_to_the_parameter() -> None:
    p = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    optimizer = optim.SGD([p], lr=1e-4, extras=optim.Extras(precision="master"))
    p.grad = torch.ones_like(p)
    optimizer.step()
    with torch.no_grad():
        p[:2] = 50.0
    optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["master"], torch.tensor([50 - 1e-4] * 2 + [1 - 2e-4] * 3))


def test_norms_are_those_of_what_is_written_to_the_parameter() -> None:
    """Not those of the master copy, which the step renews."""
    results = []
    for first in (1.0, 64.0):
        p = nn.Parameter(torch.full((4,), first, dtype=torch.bfloat16))
        optimizer = optim.LARS([p], lr=1.0, momentum=0.0, extras=optim.Extras(precision="master"))
        p.grad = torch.ones_like(p)
        optimizer.step()
        with torch.no_grad():
            p.fill_(8.0)
        optimizer.step()
        results.append(optimizer.state[p]["master"])
    assert torch.equal(*results)


def test_steps_in_shared_memory() -> None:
    params = parameters()
    optimizer = optim.AdamW(params)
    give(params)
    optimizer.step()
    optimizer.state[params[0]]["step"].share_memory_()
    for _ in range(2):
        optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params] == [3.0] * 3


def test_options_of_a_group_that_are_nobodys_business() -> None:
    params = parameters()
    optimizer = optim.AdamW([{"params": params, "note": torch.zeros(3)}])
    give(params)
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 1


@pytest.mark.parametrize("betas", [(0.9, 0.6), (0.9, 0.5), (0.9, 0.999)])
def test_radam_with_a_short_memory(betas: tuple[float, float]) -> None:
    mine, other = parameters(), parameters()
    pair = [optim.RAdam(mine, lr=0.1, betas=betas), torch.optim.RAdam(other, lr=0.1, betas=betas)]
    for step in range(12):
        give(mine, step)
        give(other, step)
        for optimizer in pair:
            optimizer.step()
    alike(mine, other)


@pytest.mark.parametrize("count", [1, 100])
def test_another_backend_may_take_over_at_any_step(count: int) -> None:
    """A table of addresses has no tensors, which the NumPy backend reads."""

    def trained(*backends: str) -> torch.Tensor:
        params = [torch.nn.Parameter(torch.full((3,), 1.0 + i)) for i in range(count)]
        optimizer = optim.AdamW(params, lr=0.1)
        for step, backend in enumerate(backends):
            for param in params:
                param.grad = torch.full((3,), 0.5 + step)
            with knobs.override(knobs.BACKEND, backend):
                optimizer.step()
        return torch.cat([param.detach() for param in params])

    expected = trained(*["numba_cpu"] * 5)
    assert torch.equal(trained("numba_cpu", "numpy", "numpy", "numba_cpu", "numpy"), expected)
    assert torch.equal(trained("numpy", "numba_cpu", "numba_cpu", "numpy", "numba_cpu"), expected)
