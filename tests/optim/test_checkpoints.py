"""Training that is interrupted, moved between our optimizers and torch's, copied or reloaded goes on as if it were not;
and no optimizer holds more than it has to."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from numba.core import event
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import bagua_kernels
from bagua_kernels import optim
from tests.grids import grid, one_of_each, only
from tests.optim.cases import SLACK

# What makes an optimizer keep other states, or use them otherwise. Muon's bfloat16 iteration magnifies one rounding.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd_momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "sgd_nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "adam": ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    "adam_amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True}),
    "adamw": ("AdamW", {"lr": 0.01}),
    "adamw_amsgrad": ("AdamW", {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "nadam": ("NAdam", {"lr": 0.01, "weight_decay": 0.1}),
    "nadamw": ("NAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": ("RAdam", {"lr": 0.01, "betas": (0.9, 0.9)}),
    "radamw": ("RAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamax": ("Adamax", {"lr": 0.01, "weight_decay": 0.1}),
    "adagrad": ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "adadelta": ("Adadelta", {"lr": 1.0, "weight_decay": 0.1}),
    "rmsprop": ("RMSprop", {"lr": 0.01}),
    "rmsprop_centered": ("RMSprop", {"lr": 0.01, "centered": True, "weight_decay": 0.1}),
    "rmsprop_momentum": ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "rprop": ("Rprop", {"lr": 0.01}),
    "asgd": ("ASGD", {"lr": 0.1, "lambd": 0.01, "t0": 2.0}),
    "muon": ("Muon", {"lr": 0.01}),
    "lion": ("Lion", {"lr": 0.01, "weight_decay": 0.1}),
    "lamb": ("LAMB", {"lr": 0.01, "weight_decay": 0.1}),
    "lars": ("LARS", {"lr": 1.0, "momentum": 0.9, "weight_decay": 0.1}),
}
IN_TORCH = {name: case for name, case in CASES.items() if hasattr(torch.optim, case[0])}
FLAGS_OF_NOW = ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")

every_case = grid(cover=1, name=list(CASES))
# For what has nothing to do with the arguments.
every_optimizer = pytest.mark.parametrize("name", one_of_each(CASES, lambda name: CASES[name][0]))
every_case_in_torch = grid(cover=1, name=list(IN_TORCH))


def new_parameters(name: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (16, 20)] if name == "muon" else [(7, 5), (130,), (), (3, 2, 2, 3)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def copied(parameters: Iterable[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().clone()) for p in parameters]


def make(library: Any, name: str, parameters: Any, **more: Any) -> torch.optim.Optimizer:
    kind, options = CASES[name]
    return getattr(library, kind)(parameters, **options | more)


def train(optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Steps with gradients that are a function of the step's number alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


CARRIERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "dict": lambda state: state,
    "deepcopy": copy.deepcopy,
    "file": through_a_file,
}


def check_same(
    name: str,
    parameters: Iterable[Tensor],
    optimizer: torch.optim.Optimizer,
    expected: Iterable[Tensor],
    reference: torch.optim.Optimizer,
) -> None:
    """Parameters and every entry of every state are equal, up to the order of a few float32 operations."""
    atol = 1e-4 if name == "muon" else 1e-6 * SLACK
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=atol)
    close([p.detach() for p in parameters], [p.detach() for p in expected])
    close(optimizer.state_dict()["state"], reference.state_dict()["state"])


@grid(
    name=list(IN_TORCH),
    carrier=["dict", "file"],
    start__end={"to_torch": (optim, torch.optim), "from_torch": (torch.optim, optim)},
    cover=1,
)
def test_switching_changes_nothing(name: str, start: Any, end: Any, carrier: str) -> None:
    parameters, expected = new_parameters(name), new_parameters(name)
    reference = make(torch.optim, name, expected)
    train(reference, range(7))
    first = make(start, name, parameters)
    train(first, range(3))
    parameters = copied(parameters)
    second = make(end, name, parameters, lr=123.0)
    second.load_state_dict(CARRIERS[carrier](first.state_dict()))
    train(second, range(3, 7))
    check_same(name, parameters, second, expected, reference)


@grid(name=list(CASES), carrier=list(CARRIERS), cover=1)
def test_reloading_changes_nothing(name: str, carrier: str) -> None:
    parameters, expected = new_parameters(name), new_parameters(name)
    reference, first = make(optim, name, expected), make(optim, name, parameters)
    train(reference, range(5))
    train(first, range(3))
    parameters = copied(parameters)
    second = make(optim, name, parameters)
    second.load_state_dict(CARRIERS[carrier](first.state_dict()))
    train(second, range(3, 5))
    assert all(map(torch.equal, parameters, expected))
    torch.testing.assert_close(second.state_dict(), reference.state_dict(), rtol=0, atol=0)


@every_case
def test_going_back_to_a_checkpoint_repeats_history(name: str) -> None:
    parameters = new_parameters(name)
    optimizer = make(optim, name, parameters)
    train(optimizer, range(2))
    weights, state = copied(parameters), copy.deepcopy(optimizer.state_dict())
    train(optimizer, range(2, 4))
    expected = copied(parameters)
    with torch.no_grad():
        torch._foreach_copy_(parameters, weights)
    optimizer.load_state_dict(copy.deepcopy(state))
    train(optimizer, range(2, 4))
    assert all(map(torch.equal, parameters, expected))


@grid(cover=1, flag=["fused", "foreach"], name=["sgd_momentum", "adamw", "adagrad"])
def test_checkpoints_of_torchs_other_implementations(name: str, flag: str) -> None:
    parameters, expected = new_parameters(name), new_parameters(name)
    reference, first = make(torch.optim, name, expected), make(torch.optim, name, parameters, **{flag: True})
    train(reference, range(5))
    train(first, range(3))
    second = make(optim, name, parameters)
    second.load_state_dict(first.state_dict())
    train(second, range(3, 5))
    check_same(name, parameters, second, expected, reference)


@every_case_in_torch
def test_files_are_no_larger_than_torchs(name: str) -> None:
    sizes = []
    for library in (optim, torch.optim):
        optimizer = make(library, name, [nn.Parameter(torch.zeros(64, 64)) for _ in range(4)])
        train(optimizer, range(1))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        sizes.append(file.tell())
    assert sizes[0] <= 1.01 * sizes[1]


@grid(
    name=list(CASES),
    duplicate={"deepcopy": copy.deepcopy, "pickle": lambda both: pickle.loads(pickle.dumps(both))},
    cover=1,
)
def test_a_copy_steps_on_its_own_and_equally(name: str, duplicate: Callable[[Any], Any]) -> None:
    parameters = new_parameters(name)
    original = make(optim, name, parameters)
    train(original, range(2))
    copies, twin = duplicate((parameters, original))
    assert type(twin) is type(original)
    before = copied(parameters)
    train(twin, range(2, 4))
    assert all(map(torch.equal, parameters, before))
    train(original, range(2, 4))
    assert all(map(torch.equal, parameters, copies))
    assert not any(map(torch.equal, parameters, before))
    torch.testing.assert_close(twin.state_dict(), original.state_dict(), rtol=0, atol=0)
    twin.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))]})
    train(twin, range(1))


def of_old(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as older releases wrote it: counters are numbers, flags that came later are missing."""
    numbers = ("step", "mu_product", "eta", "mu")
    return {
        "state": {
            key: {k: v.item() if k in numbers else v for k, v in entries.items()}
            for key, entries in state["state"].items()
        },
        "param_groups": [{k: v for k, v in g.items() if k not in FLAGS_OF_NOW} for g in state["param_groups"]],
    }


@grid(cover=1, name=[n for n in IN_TORCH if n not in ("sgd_nesterov", "adamw_amsgrad", "nadamw", "radamw")])
def test_old_checkpoints(name: str) -> None:
    parameters, expected = new_parameters(name), new_parameters(name)
    uninterrupted, first = make(optim, name, expected), make(optim, name, parameters)
    train(uninterrupted, range(5))
    train(first, range(3))
    second = make(optim, name, parameters)
    second.load_state_dict(of_old(copy.deepcopy(first.state_dict())))
    train(second, range(3, 5))
    assert all(map(torch.equal, parameters, expected))
    for entries in second.state.values():
        assert isinstance(entries.get("step", torch.ones(())), Tensor)
    missing = second.param_groups[0].keys() ^ uninterrupted.param_groups[0].keys()
    assert missing <= {"decoupled_weight_decay"}


@grid(cover=1, name=only(CASES, *(name for name in CASES if name not in ("lion", "lars"))))
def test_states_take_the_dtype_of_the_parameter(name: str) -> None:
    """A checkpoint in float64 goes on in float32; counters stay as they were."""
    wide, parameters = new_parameters(name, torch.float64), new_parameters(name)
    first, second = make(torch.optim if name in IN_TORCH else optim, name, wide), make(optim, name, parameters)
    train(first, range(2))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    counters = [entries["step"].dtype for entries in first.state.values() if "step" in entries]
    train(second, range(2, 3))
    for p in parameters:
        entries = second.state.get(p, {})
        assert {v.dtype for k, v in entries.items() if k not in ("step", "eta", "mu", "mu_product")} <= {torch.float32}
    assert [entries["step"].dtype for entries in second.state.values() if "step" in entries] == counters


@every_case
def test_loading_compiles_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = new_parameters(name)
    first = make(optim, name, parameters)
    train(first, range(2))

    def compiled_again(*args: Any, **kw: Any) -> None:
        raise AssertionError("a kernel was made anew")

    monkeypatch.setattr(numba, "njit", compiled_again)
    with event.install_recorder("numba:compile") as recorder:
        first.load_state_dict(through_a_file(first.state_dict()))
        train(first, range(2, 3))
        second = make(optim, name, copied(parameters))
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        train(second, range(3, 5))
    assert not recorder.buffer


@every_case
def test_names_of_parameters_are_kept(name: str) -> None:
    parameters = new_parameters(name)
    named = [(f"layer.{i}", p) for i, p in enumerate(parameters)]
    first, second = make(optim, name, named), make(optim, name, parameters)
    train(first, range(2))
    state = through_a_file(first.state_dict())
    assert state["param_groups"][0]["param_names"] == [key for key, _ in named]
    second.load_state_dict(state)
    assert second.param_groups[0]["param_names"] == [key for key, _ in named]
    if name in IN_TORCH:
        theirs = make(torch.optim, name, named)
        theirs.load_state_dict(state)
        assert theirs.param_groups[0]["param_names"] == [key for key, _ in named]


@grid(name=list(CASES), flatten={"nested": False, "flat": True}, cover=1)
def test_distributed_checkpoint_state_dicts(name: str, flatten: bool) -> None:
    """Into an optimizer without states, which that function fills by a step of its own."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 4, bias=False))

    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    first, second, reference = model(), model(), model()
    optimizers = [make(optim, name, m.parameters()) for m in (first, second, reference)]
    train(optimizers[0], range(3))
    train(optimizers[2], range(5))
    state = copy.deepcopy(get_optimizer_state_dict(first, optimizers[0], options=options))
    second.load_state_dict(first.state_dict())
    set_optimizer_state_dict(second, optimizers[1], state, options=options)
    train(optimizers[1], range(3, 5))
    assert all(map(torch.equal, second.parameters(), reference.parameters()))


def live_bytes() -> int:
    """Of all tensors that came since the fixture `new_objects`."""
    gc.collect()
    storages = [o.untyped_storage() for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def traced_bytes() -> int:
    """Of Python objects of the optimizers' code: a worker of a distributed run gets its list of tests on another thread."""
    files = [f"{folder}/*" for folder in (*optim.__path__, str(Path(bagua_kernels.__file__).parent), *torch.__path__)]
    traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, file) for file in files])
    return sum(trace.size for trace in traces.traces)


def others() -> list[str]:
    """The threads that may hold tensors of their own, for what a failure prints."""
    return [thread.name for thread in threading.enumerate()]


@pytest.fixture
def new_objects() -> Iterator[None]:
    """Python's collector sees no others. One thread runs, since torch's many small regions are slow on two.

    A test starts tracemalloc itself, when kernels are compiled: that takes twice as long otherwise.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    tracemalloc.stop()
    gc.unfreeze()
    torch.set_num_threads(threads)


@grid(cover=1, name=one_of_each([n for n in IN_TORCH if n != "sgd"], lambda name: CASES[name][0]))
def test_memory_held_is_torchs(name: str, new_objects: None) -> None:
    """Of 25 tensors with 40,000 elements each; arrays and Python objects, which tracemalloc sees, included."""
    parameters = [nn.Parameter(torch.ones(200, 200)) for _ in range(25)]
    for p in parameters:
        p.grad = torch.ones(200, 200)
    sizes = []
    for turn, library in enumerate((optim, optim, torch.optim)):  # once for what compiling leaves behind
        if turn == 1:
            tracemalloc.start()
        before = live_bytes() + tracemalloc.get_traced_memory()[0]
        optimizer = make(library, name, parameters, **({"ns_steps": 1} if name == "muon" else {}))
        for _ in range(2):
            optimizer.step()
        sizes.append(live_bytes() + tracemalloc.get_traced_memory()[0] - before)
        del optimizer
    _, ours, theirs = sizes
    assert theirs > 25 * 200 * 200 * 4
    assert ours <= 1.01 * theirs


@grid(cover=1, name=only(CASES, "adamw", "lamb", "sgd_momentum", "muon"))
def test_nothing_piles_up(name: str, new_objects: None) -> None:
    """Although every gradient is a new tensor; and nothing outlives the optimizer."""
    parameters = new_parameters(name)
    optimizer = make(optim, name, parameters)
    seen = []
    train(optimizer, range(5))
    tracemalloc.start()
    for _ in range(2):
        train(optimizer, range(150))
        seen.append((live_bytes(), traced_bytes()))
    assert seen[1][0] == seen[0][0], others()
    assert seen[1][1] - seen[0][1] < 150 * 200, others()
    del optimizer, parameters
    assert live_bytes() == 0, others()
