"""Hooks of `DistributedDataParallel`: each trap of its conventions, one scenario after the other on the same processes."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bagua_kernels import comm
from bagua_kernels.algorithms import ByteGrad, GradientAllReduce, ddp, from_spec
from bagua_kernels.comm.testing import run_processes
from bagua_kernels.errors import RankLostError
from tests import limits
from tests.algorithms.ddp.common import OPEN, Deep, backward, backward_of, close, close_hooks, hooked, mean, same
from tests.algorithms.ranks import Odd, batch, gradients, loss_of
from tests.grids import only


def exact() -> None:
    """Gradients are not divided by DDP before a hook has them; DDP's buckets change after the first pass."""
    model, made = hooked("allreduce", find_unused_parameters=True)
    for step in range(3):
        found = backward(model, step)
        expected = mean(step)
        close([one for one, other in zip(found, expected, strict=True) if other is not None], [
            one for one in expected if one is not None
        ])  # fmt: skip
    assert made.steps == 3
    assert made.bytes_sent > 0


def as_wrapped(spec: str, **arguments: Any) -> None:
    """No block spans tensors, so that gradients have the bits that the wrapper gives them, whatever the buckets."""
    model, _ = hooked(spec, find_unused_parameters=True, **arguments)
    wrapped = from_spec(spec, Deep())
    assert isinstance(wrapped, GradientAllReduce | ByteGrad) or wrapped.stats().steps == 0
    for step in range(4):
        found, expected = backward(model, step), backward(wrapped, step)
        same([one for one in found if one is not None and one.any()], [
            one for one in expected if one is not None and one.any()
        ])  # fmt: skip
    wrapped.close()


def views() -> None:
    """Gradients may be DDP's own memory."""
    as_wrapped("bytegrad", gradient_as_bucket_view=True)
    as_wrapped("sign:min_numel=0", gradient_as_bucket_view=True)


def feedback_survives_other_buckets() -> None:
    """What payloads lacked in the first pass is added in the second, although DDP has other buckets by then."""
    model, made = hooked("sign", Odd(0))
    rank, applied = dist.get_rank(), None
    total: list[torch.Tensor] = []
    for step in range(4):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        applied = found if applied is None else [a + b for a, b in zip(applied, found, strict=True)]
        plain = []
        for other in range(dist.get_world_size()):
            one = Odd(0)
            loss_of(one, other, step).backward()
            plain.append([p.grad for p in one.parameters() if p.grad is not None])
        now = [torch.stack(several).mean(0) for several in zip(*plain, strict=True)]
        total = now if not total else [a + b for a, b in zip(total, now, strict=True)]
    residuals = made.state_dict()["vectors"]
    names = [name for name, p in model.module.named_parameters() if p.requires_grad]
    for name, a, b in zip(names, applied or [], total, strict=True):
        lacking = torch.zeros_like(a).flatten()
        for key in residuals:
            if name in residuals[key]:
                lacking += residuals[key][name]
        # Workers' residuals are of their own gradients, so their mean is what the sum lacks; an owner's is its alone.
        everyone = torch.stack([x.to(lacking) for x in comm.world().all_gather_object(lacking)])
        owners = torch.stack(
            comm.world().all_gather_object(residuals.get("owner", {}).get(name, torch.zeros_like(lacking)))
        )
        workers = (everyone - owners).mean(0)
        torch.testing.assert_close(a.flatten() + workers + owners[0], b.flatten(), rtol=1e-4, atol=1e-5)


def profiled() -> None:
    """A profiler sees the wait of the hook; its numbers are those that it counts."""
    model, made = hooked("sign", find_unused_parameters=True)
    assert made.stats().as_dict()["steps"] == 0
    backward(model, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        backward(model, 1)
    assert "SignSGD.wait" in {event.key for event in profile.key_averages()}
    found = made.stats()
    assert (found.steps, found.bytes_sent) == (2, made.bytes_sent)
    assert (found.exchange_seconds > 0) == (found.residual_norm > 0) == (dist.get_world_size() > 1)


def accumulated() -> None:
    """In `no_sync` the hook is not called; the next pass has the sum."""
    model, made = hooked("allreduce", find_unused_parameters=True)
    rank = dist.get_rank()
    model.zero_grad()
    with model.no_sync():
        model(batch(rank, 0)).square().mean().backward()
    assert made.steps == 0
    model(batch(rank, 1)).square().mean().backward()
    found = [one for one in gradients(model) if one is not None and one.any()]
    expected = [a + b for a, b in zip(mean(0), mean(1), strict=True) if a is not None]
    close(found, expected)
    assert made.steps == 1


def passes_by_themselves() -> None:
    """Without `no_sync` and `zero_grad` only what a pass adds is exchanged; a local pass goes with the next."""
    rank = dist.get_rank()
    for spec in ("dgc:ratio=0.1", "topk:ratio=0.1", "bytegrad", "powersgd"):
        for view in (False, True):
            for local in (None, 1):
                arguments = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
                (one, _), (other, _) = hooked(spec, **arguments), hooked(spec, **arguments)
                for step in range(3):
                    one.zero_grad()
                    other.zero_grad()
                    expected: dict[str, torch.Tensor] = {}
                    for micro in range(4):
                        for model in (one, other):
                            with model.no_sync() if micro == local else contextlib.nullcontext():
                                model(batch(rank, 4 * step + micro), micro == 2 * rank).square().mean().backward()
                        if micro != local:
                            for name, p in other.named_parameters():
                                if p.grad is not None:
                                    expected[name] = expected.get(name, 0) + p.grad
                            other.zero_grad()
                    for name, p in one.named_parameters():
                        torch.testing.assert_close(
                            torch.zeros(()) if p.grad is None else p.grad, expected.get(name, torch.zeros(()))
                        )


def unknown_increments() -> None:
    """Momentum is not applied twice."""
    model, _ = hooked("dgc:ratio=0.1", Odd(0))
    loss_of(model, dist.get_rank(), 0).backward()
    for p in model.parameters():
        p.grad = None if p.grad is None else p.grad.clone()
    with pytest.raises(RuntimeError, match=r"the hook 'dgc:ratio=0.1' had exchanged.*zero_grad"):
        loss_of(model, dist.get_rank(), 1).backward()


def joined() -> None:
    """A rank with fewer batches mirrors the passes of the others with zeros, and a policy's collectives too."""
    for spec in ("allreduce", "bytegrad", "bytegrad:only_if_faster=true"):
        model, made = hooked(spec, Odd(0))
        steps = 3 + 2 * dist.get_rank()
        with model.join():
            for step in range(steps):
                model.zero_grad()
                loss_of(model, dist.get_rank(), step).backward()
        assert made.steps == 3 + 2 * (dist.get_world_size() - 1)


def unused_and_static() -> None:
    """A static graph's first pass calls hooks when all gradients have come; unused parameters stay without gradient."""
    static, _ = hooked("bytegrad", Odd(0), static_graph=True)
    plain, _ = hooked("bytegrad", Odd(0))
    for step in range(3):
        for model in (static, plain):
            model.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
        same(gradients(static), gradients(plain))
    seldom, _ = hooked("bytegrad", find_unused_parameters=True)
    for step in range(4):
        seldom.zero_grad()
        used = step % 2 == 0 and dist.get_rank() == 0
        seldom(batch(dist.get_rank(), step), used).square().mean().backward()
        assert (seldom.module.seldom.weight.grad is not None) == (step % 2 == 0)


def compiled() -> None:
    """Compiled DDP calls hooks, too; Dynamo refuses a first bucket that is larger than the others."""
    model, made = hooked("bytegrad", Odd(0), bucket_cap_mb=25)
    other, _ = hooked("bytegrad", Odd(0))
    fast = torch.compile(model, backend="aot_eager")
    for step in range(2):
        for one in (fast, other):
            one.zero_grad()
            loss_of(one, dist.get_rank(), step).backward()
        close(gradients(model), gradients(other))
    assert made.steps == 2


def scaled() -> None:
    """An infinite gradient arrives as such, and the next ones are as if it had not been."""
    model, _ = hooked("bytegrad", Odd(0))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, dist.get_rank(), 0) * (factor if dist.get_rank() == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        changed = any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert changed == (factor == 1.0)
    assert scaler.get_scale() == 2.0**9
    everyone = comm.world().all_gather_object([p.detach() for p in model.parameters()])
    same(everyone[0], everyone[1])


def resumed() -> None:
    """States are by name, go through a file, and to a hook that has not seen any bucket yet."""
    for spec in ("sign", "powersgd:rank=1", "topk:ratio=0.1"):
        model, made = hooked(spec, Odd(0))
        for step in range(3):
            backward_of(model, step)
        state = pickle.loads(pickle.dumps(made.state_dict()))
        assert state["steps"] == 3
        assert all(name in dict(Odd().named_parameters()) for named in state["vectors"].values() for name in named)
        other, again = hooked(spec, Odd(0))
        again.load_state_dict(state)
        assert again.state_dict()["steps"] == 3
        for step in range(3, 6):
            # The other one has its first buckets in this pass.
            first, second = backward_of(model, step), backward_of(other, step)
            if spec == "sign":
                same(first, second)
        with pytest.raises(ValueError, match="expected the state of a hook with the keys"):
            again.load_state_dict({"steps": 1})


def kinds_and_names() -> None:
    """Parameters of one of DDP's buckets may have codecs of their own, or none, by their names."""
    model = DistributedDataParallel(Odd(0))
    made = ddp.hook("absmax_int8", model, groups={"second.*": "absmax_int4"}, exact="1d")
    model.register_comm_hook(None, made)
    found = backward_of(model, 0)
    exact_mean = []
    for rank in range(dist.get_world_size()):
        one = Odd(0)
        loss_of(one, rank, 0).backward()
        exact_mean.append(gradients(one))
    names = [name for name, _ in model.module.named_parameters()]
    for name, got, *each in zip(names, found, *exact_mean, strict=True):
        if got is None:
            continue
        wanted = torch.stack(each).mean(0)
        error = float((got - wanted).norm() / wanted.norm())
        if wanted.dim() < 2:
            assert error < 1e-6
        else:
            least, most = (0.03, 0.3) if name == "second.weight" else (1e-4, 0.02)
            assert least < error < most, (name, error)


def copied() -> None:
    """DDP's own copies keep their hook, which begins anew."""
    model, made = hooked("bytegrad", Odd(0))
    backward_of(model, 0)
    again = copy.copy(made)
    assert again.steps == 0
    assert again.__qualname__ == made.__qualname__
    other = pickle.loads(pickle.dumps(made))
    outer = DistributedDataParallel(Odd(0))
    outer.register_comm_hook(None, other)
    same(backward_of(outer, 0), backward_of(model, 0))


def half_precision() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        model, _ = hooked("bytegrad", Odd(0).to(dtype))
        model.zero_grad()
        model(batch(dist.get_rank(), 0).to(dtype)).square().mean().backward()
        everyone = comm.world().all_gather_object(gradients(model))
        same(everyone[0], everyone[1])
        assert all(one is None or one.dtype == dtype for one in everyone[0])


def subgroup() -> None:
    """The ranks are those of DDP's process group."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = DistributedDataParallel(Odd(0), process_group=groups[dist.get_rank()])
    model.register_comm_hook(None, ddp.hook("sign", model))
    alone = Odd(0)
    same(backward_of(model, 0), backward_of(alone, 0))
    everyone = dist.new_group(list(range(dist.get_world_size())))
    model = DistributedDataParallel(Odd(0), process_group=everyone)
    model.register_comm_hook(None, ddp.hook("bytegrad", model))
    other, _ = hooked("bytegrad", Odd(0))
    same(backward_of(model, 0), backward_of(other, 0))


def many_runs() -> None:
    """With several buckets, fifty hooks neither hang nor abort."""
    for turn in range(50):
        model, made = hooked(("bytegrad", "sign", "allreduce")[turn % 3], Odd(0))
        backward_of(model, turn)
        backward_of(model, turn)
        assert made.steps == 2
        close_hooks()


def hierarchical() -> None:
    """Exchanges whose ranks make process groups as they come to them take place one at a time."""
    model, _ = hooked("allreduce:hierarchical=true", Odd(0))
    plain, _ = hooked("allreduce", Odd(0))
    for step in range(4):
        close([one for one in backward_of(model, step) if one is not None], [
            one for one in backward_of(plain, step) if one is not None
        ])  # fmt: skip


def unused_keeps_residuals() -> None:
    """What is remembered of a parameter that no rank uses is not spent on a mean that DDP drops."""
    model, made = hooked("absmax_int4", find_unused_parameters=True)
    rank = dist.get_rank()
    for step in range(6):
        model.zero_grad()
        model(batch(rank, step), seldom=step < 2).square().mean().backward()
        kept = made.state_dict()["vectors"]["worker"]["seldom.weight"]
        if step == 2:
            first = kept.clone()
    assert kept.norm() > 0
    assert torch.equal(kept, first)


def loaded_in_use() -> None:
    """A state without loss scale is loaded into exchanges that have one; several ranks' states are averaged."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model = DistributedDataParallel(Odd(0))
    made = ddp.hook("absmax_int4", model, scaler=scaler)
    model.register_comm_hook(None, made)
    OPEN.append(made)
    for step in range(2):
        model.zero_grad()
        scaler.scale(loss_of(model, dist.get_rank(), step)).backward()
    state = made.state_dict()
    made.load_state_dict(state)
    again = made.state_dict()["vectors"]["worker"]
    assert all(torch.equal(again[name], value) for name, value in state["vectors"]["worker"].items())
    states = comm.world().all_gather_object(state)
    fresh = ddp.hook("absmax_int4", model)
    fresh.load_state_dict(states)
    mean_of = fresh.state_dict()["vectors"]["worker"]["second.weight"]
    close([mean_of], [torch.stack([one["vectors"]["worker"]["second.weight"] for one in states]).mean(0)])


def refused() -> None:
    """What a hook cannot do is refused in the first pass, on all ranks."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)

        def forward(self, x: torch.Tensor) -> Any:
            return self.second(torch.utils.checkpoint.checkpoint(self.first, x.requires_grad_(), use_reentrant=True))

    model, _ = hooked("bytegrad", Checkpointed())
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        model(batch(dist.get_rank(), 0)).sum().backward()
    sparse, _ = hooked("bytegrad", nn.Embedding(10, 3, sparse=True))
    with pytest.raises(TypeError, match="sparse=False"):
        sparse(torch.tensor([1, 2])).sum().backward()


def page() -> None:
    """The code of docs/ddp-hook.md."""
    text = (Path(__file__).parents[3] / "docs" / "ddp-hook.md").read_text()
    first, second = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"net": Odd(0)}
    exec(first, names)
    backward_of(names["model"], 0)
    exec(second, names)
    assert names["state"]["steps"] == 0


def frozen_at_first() -> None:
    """A layer that is frozen in the first pass, and trained later, has the bits of one that was always trained."""
    late, _ = hooked("bytegrad", find_unused_parameters=True)
    other, _ = hooked("bytegrad", find_unused_parameters=True)
    layer = late.module.layers[2]
    layer.requires_grad_(False)
    for model in (late, other):
        backward(model, 0)
    assert layer.weight.grad is None
    assert not layer.weight.requires_grad
    layer.requires_grad_()
    for model in (late, other):
        backward(model, 1)
        # What the pass before has left stays as it is, and is not averaged again.
        model(batch(dist.get_rank(), 2)).square().mean().backward()
    same(gradients(late), gradients(other))


SCENARIOS: dict[str, Callable[[], None]] = {
    "page": page,
    "exact": exact,
    "bytegrad": lambda: as_wrapped("bytegrad"),
    "compressed": lambda: as_wrapped("compressed:codec=absmax_int4,min_numel=8"),
    "sign": lambda: as_wrapped("sign"),
    "views": views,
    "feedback": feedback_survives_other_buckets,
    "accumulated": accumulated,
    "by themselves": passes_by_themselves,
    "unknown": unknown_increments,
    "joined": joined,
    "unused": unused_and_static,
    "scaled": scaled,
    "resumed": resumed,
    "kinds": kinds_and_names,
    "copied": copied,
    "half": half_precision,
    "subgroup": subgroup,
    "hierarchical": hierarchical,
    "unused keeps": unused_keeps_residuals,
    "loaded": loaded_in_use,
    "refused": refused,
    "profiled": profiled,
    "frozen": frozen_at_first,
}
SLOW: dict[str, Callable[[], None]] = {"compiled": compiled, "many": many_runs}
QUICK = [
    "page",
    "exact",
    "bytegrad",
    "feedback",
    "accumulated",
    "by themselves",
    "unknown",
    "unused",
    "scaled",
    "resumed",
    "profiled",
    "frozen",
]


def play(names: list[str]) -> None:
    """One scenario after the other on this rank."""
    dist.init_process_group("gloo")
    for name in names:
        print(name, file=sys.stderr, flush=True)
        {**SCENARIOS, **SLOW}[name]()
        close_hooks()
    comm.shutdown()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("names", "ranks"),
    only([(QUICK, 2), (list(SCENARIOS), 2), (list(SCENARIOS), 3), (["compiled"], 2), (["many"], 2)], (QUICK, 2)),
)
def test_scenarios(names: list[str], ranks: int) -> None:
    results = run_processes(play, ranks, args=(names,), timeout=limits.seconds(100))
    assert [each.returncode for each in results] == [0] * ranks, "\n".join(each.stderr[-3000:] for each in results)


def lost() -> None:
    """A rank leaves: the other one's backward raises what happened, in time."""
    dist.init_process_group("gloo")
    comm.init(timeout=limits.seconds(10))
    # DDP's own messages would be the first to fail: those of buffers, and of the new buckets before the second pass.
    model, _ = hooked("bytegrad", torch.nn.Linear(7, 3))
    for step in range(2):
        backward_of(model, step)
    if dist.get_rank() == 1:
        os._exit(3)
    with pytest.raises(RankLostError, match=r"the hook 'bytegrad' failed, and.*rank 1.*restart from a") as caught:
        backward_of(model, 2)
    assert caught.value.ranks == (1,)
    print("told", flush=True)
    os._exit(0)


@pytest.mark.slow
def test_a_lost_rank() -> None:
    results = run_processes(lost, 2, timeout=limits.seconds(60))
    assert (results[0].returncode, results[0].stdout.strip()) == (0, "told"), results[0].stderr[-3000:]
