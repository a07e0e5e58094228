"""Where parameters, gradients and states lie in memory makes no difference, and it may change between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bagua_kernels import optim
from tests.grids import grid, noted, only
from tests.optim.cases import SLACK

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.01, "amsgrad": True},
    **{name: {"lr": 0.01} for name in ("AdamW", "NAdam", "RAdam", "Adamax", "Rprop", "Muon")},
    "Adagrad": {"lr": 0.1},
    "Adadelta": {"lr": 1.0},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "ASGD": {"lr": 0.1, "t0": 1.0},
    **{name: {"lr": 0.01, "weight_decay": 0.1} for name in ("Lion", "LAMB")},
    "LARS": {"lr": 1.0, "weight_decay": 0.1},
}
COUNTERS = ("step", "mu_product", "eta", "mu")
CLEAR_ERRORS = (RuntimeError, ValueError, TypeError)
every_optimizer = grid(cover=1, name=list(OPTIONS))


def make(name: str, parameters: Any, library: Any = optim, **more: Any) -> torch.optim.Optimizer:
    return getattr(library, name)(parameters, **OPTIONS[name] | more)


def reference(name: str, parameters: Any, **more: Any) -> torch.optim.Optimizer:
    """torch's own where there is one."""
    return make(name, parameters, torch.optim if hasattr(torch.optim, name) else optim, **more)


def values(shape: Iterable[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of magnitudes from 0.5 to 1.5, which every dtype has room for, and of both signs."""
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(shape)
    magnitude = 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
    sign = torch.randint(2, shape, generator=generator) * 2 - 1
    if dtype.is_complex:
        return torch.polar(magnitude, sign * magnitude).to(dtype)
    return (magnitude * sign).to(dtype)


def close(name: str, actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4 if name == "Muon" else 1e-6 * SLACK)


def refuses(step: Callable[[], Any]) -> bool:
    """As torch refuses some of these; it may have written by then, as a loop of operations does."""
    try:
        step()
    except CLEAR_ERRORS:
        return True
    return False


def channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def column_major(t: Tensor) -> Tensor:
    return t.t().contiguous().t()


def negated(t: Tensor) -> Tensor:
    """The same values by way of the bit that `.imag` of a conjugate sets."""
    return torch._neg_view(-t)


# Shape of the memory, which part of it is the parameter, and how its gradient is laid out.
Layout = tuple[tuple[int, ...], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
PLANES: dict[str, Layout] = {
    "transposed parameter": ((9, 14), Tensor.t, Tensor.contiguous),
    "transposed gradient": ((9, 14), torch.clone, column_major),
    "both transposed": ((9, 14), Tensor.t, column_major),
    "columns": ((12, 9), lambda w: w[:, :5], Tensor.contiguous),
    "columns of columns": ((12, 18), lambda w: w[:, 1::3], column_major),
    "rows": ((12, 9), lambda w: w[::2], Tensor.contiguous),
    "columns across tasks": ((200, 250), lambda w: w[:, 3:210], Tensor.contiguous),
    "expanded gradient": ((6, 7), torch.clone, lambda g: g[:1].expand_as(g)),
    "gradient with gaps": ((6, 7), torch.clone, lambda g: torch.stack([g, g], 2)[:, :, 0]),
    "negative gradient": ((6, 7), torch.clone, negated),
    "odd offset": ((85,), lambda w: w[1:].view(7, 12), Tensor.contiguous),
}
OTHERS: dict[str, Layout] = {
    "channels_last parameter": ((2, 4, 5, 3), lambda w: w.permute(0, 3, 1, 2), Tensor.contiguous),
    "channels_last gradient": ((2, 3, 4, 5), torch.clone, channels_last),
    "both channels_last": ((2, 4, 5, 3), lambda w: w.permute(0, 3, 1, 2), channels_last),
    "patch of planes": ((3, 6, 7), lambda w: w[:, 1:4, 2:6], Tensor.contiguous),
    "every third": ((40,), lambda w: w[::3], Tensor.contiguous),
    "diagonal": ((8, 8), torch.diagonal, Tensor.contiguous),
    "element": ((5,), lambda w: w[2], Tensor.contiguous),
    "scalar": ((), torch.clone, Tensor.contiguous),
    "empty": ((3, 0), torch.clone, Tensor.contiguous),
}
LAYOUTS = PLANES | OTHERS


@grid(
    name=list(OPTIONS),
    layout=list(LAYOUTS),
    where=lambda name, layout: layout in PLANES or name != "Muon",
    cover=1,
    most=1,
)
def test_layouts(name: str, layout: str) -> None:
    check_layout(name, layout)


@pytest.mark.slow
@every_optimizer
def test_all_layouts(name: str) -> None:
    for layout in PLANES if name == "Muon" else LAYOUTS:
        with noted(layout):
            check_layout(name, layout)


def check_layout(name: str, layout: str) -> None:
    shape, part, arranged = LAYOUTS[layout]
    memory = values(shape, 0)
    view = part(memory)
    parameter, beside = nn.Parameter(view), nn.Parameter(values((3, 3), 5))
    expected = [nn.Parameter(view.clone(memory_format=torch.contiguous_format)), nn.Parameter(beside.detach().clone())]
    assert parameter.stride() == view.stride()
    ours, theirs = make(name, [parameter, beside]), reference(name, expected)
    outside = torch.ones_like(memory, dtype=torch.bool)
    part(outside)[...] = False
    untouched = memory[outside].clone()
    for step in range(3):
        g = arranged(values(view.shape, 10 + step))
        parameter.grad, expected[0].grad = g, g.clone(memory_format=torch.contiguous_format).resolve_neg()
        for p in (beside, expected[1]):
            p.grad = values(p.shape, 20 + step)
        kept = g.clone()
        ours.step()
        theirs.step()
        assert torch.equal(g, kept)
    close(name, [parameter, beside], expected)
    if view.data_ptr() == memory.data_ptr():
        assert torch.equal(memory[outside], untouched)
    close(name, ours.state_dict()["state"], theirs.state_dict()["state"])


IN_TORCH = [n for n in OPTIONS if n not in ("Muon", "Lion", "LAMB", "LARS")]


@grid(cover=1, name__dtype=[(n, torch.complex64) for n in IN_TORCH] + [(n, torch.complex128) for n in ("SGD", "AdamW")])
def test_complex_parameters(name: str, dtype: torch.dtype) -> None:
    """Beside a real one, and once as a view with gaps."""
    tolerance = 1e-5 if dtype == torch.complex64 else 1e-12

    def parameters() -> list[nn.Parameter]:
        memory = values((4, 9), 1, dtype)
        return [nn.Parameter(values((6, 3), 0, dtype)), nn.Parameter(memory[:, :5]), nn.Parameter(values((5,), 2))]

    ours, theirs = parameters(), parameters()
    optimizers = make(name, ours), reference(name, theirs)
    for step in range(3):
        for a, b in zip(ours, theirs, strict=True):
            b.grad = values(b.shape, 10 + step, b.dtype)
            a.grad = b.grad.t().contiguous().t() if a is ours[0] else b.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=tolerance, atol=tolerance)
    close(name, ours[2:], theirs[2:])
    states, wanted = (optimizer.state_dict()["state"][0] for optimizer in optimizers)
    torch.testing.assert_close(states, wanted, rtol=tolerance, atol=tolerance)


@grid(cover=1, name=["Lion", "LAMB", "LARS"])
def test_complex_parameters_are_refused_or_pairs_of_reals(name: str) -> None:
    complex_, pairs = nn.Parameter(values((6, 3), 0, torch.complex64)), nn.Parameter(values((6, 3), 0, torch.complex64))
    real = nn.Parameter(torch.view_as_real(pairs.detach()))
    complex_.grad = values((6, 3), 1, torch.complex64)
    real.grad = torch.view_as_real(complex_.grad)
    if not refuses(make(name, [complex_]).step):
        make(name, [real]).step()
        close(name, [complex_], [pairs])


@grid(cover=1, name=[n for n in OPTIONS if n != "Muon"])
def test_parameters_that_overlap_themselves_are_refused(name: str) -> None:
    parameter = nn.Parameter(values((3, 1), 0).expand(3, 5))
    parameter.grad = values((3, 5), 1)
    with pytest.raises((RuntimeError, ValueError)):
        make(name, [parameter]).step()


@grid(
    overlap=["partly", "twice"],
    name__n=[(n, 60) for n in OPTIONS if n not in ("Muon", "LAMB", "LARS")] + [("SGD", 66_000), ("AdamW", 66_000)],
    cover=1,
)
def test_parameters_that_share_memory(name: str, n: int, overlap: str) -> None:
    """Are updated one after the other, or refused before anything is written."""

    def parameters() -> tuple[Tensor, list[nn.Parameter]]:
        memory = values((n,), 0)
        views = [memory[: 2 * n // 3], memory[n // 3 :]] if overlap == "partly" else [memory, memory.data]
        return memory, [nn.Parameter(v) for v in views]

    (memory, ours), (wanted, theirs) = parameters(), parameters()
    optimizers = make(name, ours), reference(name, theirs)
    for step in range(3):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            a.grad, b.grad = values(a.shape, 10 + step + i), values(a.shape, 10 + step + i)
        before = memory.clone()
        try:
            optimizers[0].step()
        except (RuntimeError, ValueError):
            assert torch.equal(memory, before)
            return
        optimizers[1].step()
    close(name, [memory], [wanted])


Change = Callable[[torch.optim.Optimizer, nn.Parameter], Any]


def of_states(change: Callable[[Tensor], Tensor | None], counters: bool = False) -> Change:
    """Replaces each state tensor, or the counters, by what `change` makes of it; None if it was changed in place."""

    def apply(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> None:
        state = optimizer.state[p]
        for key, value in list(state.items()):
            if isinstance(value, Tensor) and (key == "step" if counters else key not in COUNTERS):
                changed = change(value)
                state[key] = value if changed is None else changed

    return apply


def load_earlier_state(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    optimizer.load_state_dict(state)


def add_group(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> None:
    late = nn.Parameter(values((4, 6), 77))
    late.grad = values((4, 6), 78)
    optimizer.add_param_group({"params": [late], "lr": 0.5, "weight_decay": 0.25})


def grow_parameter(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> None:
    """As Gaussian splatting does when it makes points denser."""
    of_states(lambda s: torch.cat([s, s[:2]]))(optimizer, p)
    state = optimizer.state.pop(p)
    grown = nn.Parameter(torch.cat([p.detach(), p.detach()[:2]]))
    grown.grad = values(grown.shape, 79)
    optimizer.param_groups[0]["params"][0] = grown
    optimizer.state[grown] = state


CHANGES: dict[str, Change] = {
    "data swapped": lambda o, p: setattr(p, "data", p.data * 2),
    "data transposed": lambda o, p: setattr(p, "data", column_major(p.data)),
    "data viewed transposed": lambda o, p: setattr(p, "data", p.data.t()),
    "data set": lambda o, p: p.set_(p + 1),
    "gradient's data swapped": lambda o, p: setattr(p.grad, "data", column_major(p.grad.data * -2)),
    "gradient in place": lambda o, p: p.grad.mul_(-2),
    "gradient gone": lambda o, p: setattr(p, "grad", None),
    "states replaced": of_states(lambda s: s * 2),
    "states transposed": of_states(column_major),
    "states viewed transposed": of_states(Tensor.t_),
    "states' data swapped": of_states(lambda s: setattr(s, "data", s.data * 2)),
    "states in place": of_states(lambda s: s.mul_(3)),
    "step replaced": of_states(torch.ones_like, counters=True),
    "step in place": of_states(lambda s: s.fill_(1.0), counters=True),
    "new dict of states": lambda o, p: o.state.update({p: {k: copy.copy(v) for k, v in o.state[p].items()}}),
    "earlier state loaded": load_earlier_state,
    "one state forgotten": lambda o, p: o.state.pop(p),
    "all states forgotten": lambda o, p: o.state.clear(),
    "group added": add_group,
    "parameter grown": grow_parameter,
    "settings": lambda o, p: o.param_groups[0].update(lr=0.3, weight_decay=0.25),
}


@grid(
    name=list(OPTIONS),
    change=list(CHANGES),
    # Adagrad makes states in its constructor only.
    where=lambda name, change: (name, "forgotten" in change) != ("Adagrad", True),
    cover=1,
    most=1,
)
def test_changes_between_steps_are_noticed(name: str, change: str) -> None:
    check_change(name, change)


@pytest.mark.slow
@every_optimizer
def test_all_changes_between_steps_are_noticed(name: str) -> None:
    for change in CHANGES:
        if name != "Adagrad" or "forgotten" not in change:
            with noted(change):
                check_change(name, change)


def check_change(name: str, change: str) -> None:
    """What a step does is what a fresh optimizer would do, given all that can be seen of this one."""
    parameters = [nn.Parameter(values(shape, i)) for i, shape in enumerate([(6, 6), (8, 9), (3, 3)])]
    optimizer = make(name, parameters)
    for step in range(2):
        for i, p in enumerate(parameters):
            p.grad = values(p.shape, 10 * step + i)
        optimizer.step()

    def tensors_of(p: Tensor) -> list[Tensor]:
        return [t for t in (p.data, *optimizer.state.get(p, {}).values()) if isinstance(t, Tensor)]

    old = tensors_of(parameters[0])
    with torch.no_grad():
        CHANGES[change](optimizer, parameters[0])
    for _ in range(2):
        present = [p for g in optimizer.param_groups for p in g["params"]]
        live = {t.data_ptr() for p in present for t in tensors_of(p)}
        dropped = [(t, t.clone()) for t in old if t.data_ptr() not in live]
        twins = [nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in present]
        for p, twin in zip(present, twins, strict=True):
            twin.grad = None if p.grad is None else p.grad.clone(memory_format=torch.contiguous_format)
        rest = iter(twins)
        expected = reference(name, [{"params": [next(rest) for _ in g["params"]]} for g in optimizer.param_groups])
        expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
        expected.step()
        close(name, present, twins)
        close(name, optimizer.state_dict()["state"], expected.state_dict()["state"])
        assert all(torch.equal(now, before) for now, before in dropped)
        for p in present:
            p.grad = values(p.shape, 55)


ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("name", only(["SGD", "AdamW", "Lion", "LAMB"], "SGD"))
def test_dtypes_side_by_side(name: str) -> None:
    dtypes = [d for d in ROUNDING for _ in range(2)]
    ours = [nn.Parameter(values((11, 9), i, d)) for i, d in enumerate(dtypes)]
    exact = [nn.Parameter(p.detach().double()) for p in ours]
    optimizers = make(name, ours), reference(name, exact)
    for step in range(3):
        for i, (p, e) in enumerate(zip(ours, exact, strict=True)):
            p.grad = values(p.shape, 10 * step + i, p.dtype)
            e.grad = p.grad.double()
        for optimizer in optimizers:
            optimizer.step()
    for p, e in zip(ours, exact, strict=True):
        torch.testing.assert_close(p.double(), e, rtol=ROUNDING[p.dtype], atol=ROUNDING[p.dtype])
        assert {s.dtype for k, s in optimizers[0].state[p].items() if k != "step"} == {p.dtype}


@grid(dtype=[torch.bfloat16, torch.float16], n=[65, 1000, 40_000], fused=[None, True])
def test_sgd_in_half_precision(dtype: torch.dtype, n: int, fused: bool | None) -> None:
    """Which torch 2.13's fused kernel has wrong from one vector on."""
    ours = nn.Parameter(values((n,), 0, dtype))
    exact = nn.Parameter(ours.detach().double())
    optimizers = make("SGD", [ours], fused=fused), make("SGD", [exact], torch.optim)
    for step in range(4):
        ours.grad = values((n,), 10 + step, dtype)
        exact.grad = ours.grad.double()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours.double(), exact, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    buffers = [o.state[p]["momentum_buffer"].double() for o, p in zip(optimizers, (ours, exact), strict=True)]
    torch.testing.assert_close(*buffers, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@grid(cover=1, name=["SGD", "AdamW"])
def test_conjugated_gradient(name: str) -> None:
    """The bit that `.conj()` sets is obeyed, or the gradient refused."""
    ours, wanted = (nn.Parameter(values((6, 3), 0, torch.complex64)) for _ in range(2))
    ours.grad = values((6, 3), 1, torch.complex64).conj()
    wanted.grad = ours.grad.resolve_conj()
    if not refuses(make(name, [ours]).step):
        reference(name, [wanted]).step()
        close(name, [ours], [wanted])


def test_dtype_that_changes_in_place() -> None:
    p = nn.Parameter(torch.ones(70, dtype=torch.bfloat16))
    optimizer = optim.SGD([p], lr=0.5)
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.data = p.data.view(torch.float16).fill_(1.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(p, torch.full_like(p, 0.5))


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no gradients of another dtype")
@grid(cover=1, name=only(OPTIONS, "SGD", "LAMB"))
def test_gradient_of_another_dtype(name: str) -> None:
    ours, wanted = nn.Parameter(values((9, 12), 0)), nn.Parameter(values((9, 12), 0))
    ours.grad_dtype = None
    ours.grad = values((9, 12), 1, torch.bfloat16)
    wanted.grad = ours.grad.float()
    if not refuses(make(name, [ours]).step):
        reference(name, [wanted]).step()
        torch.testing.assert_close(ours, wanted, rtol=1e-2, atol=1e-3)


@every_optimizer
def test_parameters_without_memory(name: str) -> None:
    """On `meta`, where torch has nothing to do, beside one that has memory."""
    empty, ours = nn.Parameter(torch.empty(4, 5, device="meta")), nn.Parameter(values((4, 5), 0))
    wanted = nn.Parameter(values((4, 5), 0))
    for p in (empty, ours, wanted):
        p.grad = values((4, 5), 1).to(p.device)
    if not refuses(make(name, [ours, empty]).step):
        reference(name, [wanted]).step()
        close(name, [ours], [wanted])
