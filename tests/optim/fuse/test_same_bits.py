"""The oracle is the optimizer itself, unfused: what a fused one does has to be the same, bit for bit."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from bagua_kernels.optim.fuse.optimizer import fuse_optimizer
from tests.grids import grid, noted
from tests.optim import pairs
from tests.optim.fuse.steps import Counting, assert_same, flat, give_gradients, pair, parameters

ELEMENTWISE = {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"}
# Those of which torch has a kernel of its own.
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
# The flags that choose an implementation of torch.
PATHS = ({"foreach": False}, {"foreach": None}, {"foreach": True}, {"fused": True})


@functools.cache
def configurations() -> list[tuple[str, dict[str, object]]]:
    """PyTorch's own list of what its optimizers are tested with."""
    found = []
    for entry in pairs.torchs_table().optim_db:
        if entry.optim_cls.__name__ in ELEMENTWISE:
            for given in entry.optim_inputs_func(device="cpu"):
                for path in PATHS:
                    tensor_lr = isinstance(given.kwargs.get("lr"), torch.Tensor)
                    if (path == {"foreach": True} and tensor_lr) or (
                        "fused" in path and "fused" not in entry.supported_impls
                    ):
                        continue
                    found.append((entry.optim_cls.__name__, {**given.kwargs, **path}))
    return found


@pytest.mark.slow
@grid(
    name=sorted(ELEMENTWISE),
    path={f"{key}={value}": (key, value) for path in PATHS for key, value in path.items()},
    dtype=[torch.float32, torch.float64],
    where=lambda name, path, dtype: (
        (path[0] != "fused" or name in FUSED) and (dtype == torch.float32 or name in ("SGD", "AdamW", "RMSprop"))
    ),
    cover=1,
)
def test_every_elementwise_optimizer_of_torch_is_fused_bit_for_bit(name, path, dtype):
    found = of(name, path)
    assert found
    for options in found:
        with noted(repr(options)):
            check_fused(name, options, dtype)


def of(name: str, path: tuple[str, bool | None]) -> list[dict[str, object]]:
    """The options of an optimizer that are tested with a flag."""
    key, value = path
    return [options for kind, options in configurations() if kind == name and options.get(key, ...) == value]


def check_fused(name, options, dtype):
    left, plain, right, fused = pair(lambda ps: getattr(torch.optim, name)(ps, **options), dtype=dtype)
    for step in range(8):
        give_gradients(step, left, right, skip=(3,) if step == 4 else ())
        plain.step()
        fused.step()
        assert_same(plain, fused)
    # With fused=True, only tensors of whole vectors are flattened; here that is one alone, which needs no flattening.
    # A parameter that was skipped divides the run it was in, where steps are counted.
    assert flat(fused) == (0 if options.get("fused") else 1 if name == "SGD" else 2)
    assert isinstance(fused, getattr(torch.optim, name))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_torch_fused_kernels_are_flattened_where_tensors_fill_vectors(name):
    shapes = [(64,), (16, 8), (7,), (192,), (65,)]
    options = {"momentum": 0.9} if name == "SGD" else {}
    left, plain, right, fused = pair(
        lambda ps: getattr(torch.optim, name)(ps, lr=0.1, fused=True, **options), shapes=shapes
    )
    for step in range(20):
        give_gradients(step, left, right)
        plain.step()
        fused.step()
    assert_same(plain, fused)
    assert [p.shape for p in fused._flat_step.runs[0].params] == [(64,), (16, 8), (192,)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_a_cpu_stays_exact_because_it_is_not_flattened(dtype):
    left, plain, right, fused = pair(lambda ps: torch.optim.Adam(ps, weight_decay=0.1), dtype=dtype)
    for step in range(5):
        give_gradients(step, left, right)
        plain.step()
        fused.step()
    assert_same(plain, fused)
    assert flat(fused) == 0


def test_large_tensors_and_threads_change_nothing():
    torch.set_num_threads(2)
    shapes = [(70001,), (333,), *[(16001,)] * 9, (40000,), (5,)]
    left, plain, right, fused = pair(lambda ps: torch.optim.NAdam(ps, weight_decay=0.1), shapes=shapes)
    for step in range(3):
        give_gradients(step, left, right)
        plain.step()
        fused.step()
    assert_same(plain, fused)
    # A run ends where it would leave the cache; large tensors are left as they are.
    assert [len(run.params) for run in fused._flat_step.runs] == [9, 2]


def test_numbers_in_state_and_counters_elsewhere():
    left, plain, right, fused = pair(Counting)
    for step in range(9):
        give_gradients(step, left, right, skip=(0, 4) if step == 6 else ())
        plain.step()
        fused.step()
        assert_same(plain, fused)
    assert plain.calls == fused.calls == 9
    assert fused.state["total"] == 9


def test_gradients_accumulate():
    left, plain, right, fused = pair(torch.optim.Adadelta)
    for step in range(6):
        for ps, optimizer in ((left, plain), (right, fused)):
            sum((p.sin() * (step + 1)).sum() for p in ps).backward()
            optimizer.step()
            if step % 2:
                optimizer.zero_grad(set_to_none=step == 3)
    assert_same(plain, fused)


def odd_parameters() -> list[torch.Tensor]:
    """Parameters that cannot be moved, among some that can."""
    generator = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    shared, packed = rand(8), rand(10)
    return [
        nn.Parameter(rand(5, 4)),
        nn.Parameter(rand()),
        nn.Parameter(rand(0, 3)),
        nn.Parameter(rand(6, 3).t()),
        nn.Parameter(rand(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(rand(8, 8)[:, :3]),
        nn.Parameter(torch.complex(rand(4), rand(4))),
        nn.Parameter(shared),
        nn.Parameter(shared.view(2, 4)),
        nn.Parameter(packed[2:8]),
        rand(7).requires_grad_(),
        nn.Parameter(rand(9).double()),
        nn.Parameter(rand(11).double()),
        nn.Parameter(rand(12)),
        nn.Parameter(rand(13).share_memory_()),
    ]


def test_parameters_of_all_kinds():
    left, right = odd_parameters(), odd_parameters()
    addresses = [p.data_ptr() for p in right]
    plain, fused = torch.optim.Adam(left), fuse_optimizer(torch.optim.Adam(right))
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(left, right, strict=True):
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            q.grad = p.grad.clone()
        plain.step()
        fused.step()
        assert_same(plain, fused)
    moved = [i for i, p in enumerate(right) if p.data_ptr() != addresses[i]]
    assert moved == [0, 3, 4, 10, 11, 12, 13]
    assert flat(fused) == 2


def test_sparse_gradients_are_stepped_as_they_are():
    left, right = parameters(), parameters()
    plain, fused = torch.optim.SGD(left, lr=0.1), fuse_optimizer(torch.optim.SGD(right, lr=0.1))
    for step in range(4):
        give_gradients(step, left, right)
        if step != 1:
            for p in (left[1], right[1]):
                p.grad = p.grad.to_sparse()
        plain.step()
        fused.step()
        assert_same(plain, fused)
