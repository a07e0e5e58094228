"""Finding out what can be flattened: which optimizers, by trial, and which parameters, by where they lie."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from bagua_kernels.bucket import dense_strides

# Tensors start at multiples of this many elements, so that each lies in whole vectors of a CPU's registers, as it would alone.
ALIGN = 64

# Vectors, matrices, a convolution's kernel; one matrix with sides from which optimizers begin to factor. Enough steps for what is
# done only now and then, such as the bookkeeping of a preconditioner.
_SHAPES = ((3,), (79,), (5, 7), (129, 131), (4, 3, 3, 3), (15,), (11, 13))
_WHOLE = ((64,), (192,), (8, 16), (128, 130), (4, 4, 2, 4), (128,), (16, 12))
_SCALES = (1.0, 1e-3, 30.0, 1.0, 0.1, 1e-2, 3.0)
_STEPS = 12


class NotElementwiseError(ValueError):
    """An optimizer cannot be fused: a step on a flat tensor would differ from steps on its parts, as the message shows."""


def raw_step(base: type[Optimizer]) -> Callable[..., Any]:
    """The class's `step` without the wrapper that runs hooks."""
    step = base.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def trials(
    optimizer: Optimizer, groups: list[dict[str, Any]], base: type[Optimizer], fused: type[Optimizer]
) -> list[int]:
    """What `probe` returns for each group; groups with equal options are tried once."""
    found: dict[str, int] = {}
    for group in groups:
        if group.get("differentiable"):
            raise NotElementwiseError(
                f"{type(optimizer).__name__} cannot be fused: with differentiable=True autograd records its step on the "
                "parameters themselves, which flat tensors have no part in; pass differentiable=False, or use it without "
                "fuse_optimizer"
            )
        options = repr(
            sorted((k, v) for k, v in group.items() if k not in ("params", "param_names", "lr", "initial_lr"))
        )
        if options not in found:
            found[options] = probe(optimizer, group, base, fused)
    return list(found.values())


def probe(optimizer: Optimizer, group: dict[str, Any], base: type[Optimizer], fused: type[Optimizer]) -> int:
    """Steps copies of an optimizer on small synthetic tensors, as they are and flattened, and compares all bits.

    Neither the optimizer's tensors nor torch's global random numbers are touched.

    Args:
        optimizer: what to try; only its class and attributes are used.
        group: the options to try it with, and the device.
        base: the optimizer's class.
        fused: the subclass of it that is fused.

    Returns:
        The number of elements of which a tensor must hold a multiple to be stepped identically: 1, or `ALIGN` where the last
        elements of a tensor are rounded differently.

    Raises:
        NotElementwiseError: the results differ, or the trial failed.
    """
    device = next((p.device for p in group["params"] if p.device.type != "meta"), torch.device("cpu"))
    with torch.random.fork_rng([device] if device.type == "cuda" else []), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Of torch's own fused kernels it is known that they round the last elements differently, if only now and then.
        if not group.get("fused"):
            difference = _difference(optimizer, group, base, fused, device, _SHAPES)
            if difference is None:
                return 1
        # An optimizer that mixes elements does so with any number of them.
        difference = _difference(optimizer, group, base, fused, device, _WHOLE)
        if difference is None:
            return ALIGN
    raise _refusal(optimizer, f"it is not elementwise: {difference}")


def _difference(
    optimizer: Optimizer,
    group: dict[str, Any],
    base: type[Optimizer],
    fused: type[Optimizer],
    device: torch.device,
    shapes: tuple[tuple[int, ...], ...],
) -> str | None:
    """What differs between stepping tensors as they are and flattened, if anything does."""
    generator = torch.Generator().manual_seed(0)
    start = [
        torch.randn(shape, generator=generator, dtype=torch.float32) * scale
        for shape, scale in zip(shapes, _SCALES, strict=True)
    ]
    try:
        plain, flat = (_copied(base, optimizer, group, start, device) for _ in range(2))
    except Exception as error:
        raise _refusal(optimizer, f"no copy for a trial could be made: {type(error).__name__}: {error}") from error
    flat.__class__ = fused
    vars(flat)["_unit"] = 1

    def backward(step: int) -> None:
        for i, (left, right) in enumerate(zip(_params(plain), _params(flat), strict=True)):
            gradient = (
                torch.randn(shapes[i], generator=generator, dtype=torch.float32)
                * _SCALES[-1 - i]
                * 10.0 ** (step % 3 - 1)
            )
            # One tensor is left out once, so that its count of steps differs from then on.
            skipped = i == 2 and step == _STEPS // 2
            # waits: a probe at construction.
            left.grad, right.grad = (None if skipped else gradient.to(device).clone() for _ in range(2))

    for step in range(_STEPS):
        backward(step)
        try:
            raw_step(base)(plain)
        except Exception as error:
            reason = "it needs a closure" if "closure" in str(error) else "its step fails on synthetic tensors"
            raise _refusal(optimizer, f"{reason}: {type(error).__name__}: {error}") from error
        try:
            raw_step(fused)(flat)
        except Exception as error:
            return f"its step fails on a flat tensor: {type(error).__name__}: {error}"
        if step == 0 and len(flat._flat_step.fused) < len(shapes):  # type: ignore[attr-defined]
            return "its state cannot be flattened"
        difference = _first_difference(plain, flat)
        if difference is not None:
            return difference
    for p, before in zip(_params(plain), start, strict=True):
        # waits: a probe at construction.
        if not p.isfinite().all() or torch.equal(p.detach().cpu(), before):
            raise _refusal(
                optimizer, f"a trial shows nothing: its step does not change a parameter of shape {tuple(p.shape)}"
            )
    if "closure" in inspect.signature(base.step).parameters:
        _check_closure(base, optimizer, plain)
    return None


def _first_difference(plain: Optimizer, fused: Optimizer) -> str | None:
    for p, q in zip(_params(plain), _params(fused), strict=True):
        shape = tuple(p.shape)
        if not torch.equal(p, q):
            # waits: a probe at construction.
            return (
                f"flattened, a parameter of shape {shape} comes out different by up to {(p - q).abs().max().item():.1g}"
            )
        left, right = plain.state.get(p, {}), fused.state.get(q, {})
        if left.keys() != right.keys():
            return f"flattened, the state of a parameter of shape {shape} has the keys {list(right)}, not {list(left)}"
        for key, value in left.items():
            if not _equal(value, right[key]):
                return f"flattened, state[{key!r}] of a parameter of shape {shape} is different"
    return None


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


def _check_closure(base: type[Optimizer], optimizer: Optimizer, plain: Optimizer) -> None:
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.zeros((), dtype=torch.float32)

    try:
        raw_step(base)(plain, closure)
    except Exception as error:
        raise _refusal(optimizer, f"its step fails with a closure: {type(error).__name__}: {error}") from error
    if calls > 1:
        raise _refusal(optimizer, f"it evaluates its closure {calls} times a step, and its gradients change in between")


def _copied(
    base: type[Optimizer], optimizer: Optimizer, group: dict[str, Any], start: list[torch.Tensor], device: torch.device
) -> Optimizer:
    """An optimizer like the given one, for copies of other tensors."""
    # waits: a probe at construction.
    params = [torch.nn.Parameter(p.to(device, copy=True)) for p in start]
    # Whatever of the optimizer refers to its parameters, or to itself, must not lead back to them.
    memo: dict[int, Any] = {
        id(p): torch.zeros((), dtype=torch.float32) for g in optimizer.param_groups for p in g["params"]
    }
    options = {k: copy.deepcopy(v, memo) for k, v in group.items() if k not in ("params", "param_names")}
    if "lr" in options:
        # Schedulers begin with rates of almost nothing, with which no difference would show.
        options["lr"] = torch.full_like(options["lr"], 0.01) if isinstance(options["lr"], torch.Tensor) else 0.01
    groups = [{**options, "params": params}]
    defaults = copy.deepcopy(optimizer.defaults, memo)
    try:
        # Some make their first state in the constructor.
        accepted = inspect.signature(base).parameters
        copied = base(groups, **{k: v for k, v in defaults.items() if k in accepted})
    except Exception:
        copied = object.__new__(base)
        copied.__setstate__({"defaults": defaults, "state": defaultdict(dict), "param_groups": groups})
    memo[id(optimizer)] = copied
    for name, value in vars(optimizer).items():
        own = ("param_groups", "state", "step", "_unit", "_flat_step", "_storages")
        if name not in own and not name.endswith("_hooks"):
            vars(copied)[name] = copy.deepcopy(value, memo)
    return copied


def _params(optimizer: Optimizer) -> list[torch.Tensor]:
    return list(optimizer.param_groups[0]["params"])


def _refusal(optimizer: Optimizer, reason: str) -> NotElementwiseError:
    return NotElementwiseError(f"{type(optimizer).__name__} cannot be fused: {reason}; use it without fuse_optimizer")


def padded(p: torch.Tensor) -> int:
    """The elements that a parameter takes up in flat storage."""
    return -(-p.numel() // ALIGN) * ALIGN


def movable_ids(params: list[torch.Tensor], owned: set[int]) -> set[int]:
    """The ids of parameters whose storage may be replaced: dense, and sharing no memory with anything else."""
    spans = []
    covered: dict[int, int] = defaultdict(int)
    with_padding: dict[int, int] = defaultdict(int)
    movable = {}
    for p in params:
        plain = type(p) in (torch.Tensor, torch.nn.Parameter) and p.layout is torch.strided and p.device.type != "meta"
        if not plain or p.numel() == 0 or (p.device.type == "cpu" and p.is_shared()):
            continue  # Shared means: with other processes.
        reach = 1 + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
        spans.append((p.data_ptr(), p.data_ptr() + reach * p.element_size(), id(p)))
        storage = p.untyped_storage().data_ptr()
        covered[storage] += p.numel() * p.element_size()
        with_padding[storage] += padded(p) * p.element_size()
        # Half precision on a CPU rounds differently at the end of a tensor and between threads, see docs/fuse-optimizer.md.
        half = p.dtype in (torch.float16, torch.bfloat16) and p.device.type != "cpu"
        # One element is a scalar's shape: a moment and a counter cannot be distinguished there.
        if (half or p.dtype in (torch.float32, torch.float64)) and p.numel() > 1 and dense_strides(p) == p.stride():
            movable[id(p)] = p
    # A storage that our parameters do not fill, unless it is a layout's or a copy of one, has other owners: they would lose them.
    for p in list(movable.values()):
        storage, size = p.untyped_storage().data_ptr(), p.untyped_storage().nbytes()
        if storage not in owned and size > covered[storage] and size != with_padding[storage]:
            del movable[id(p)]
    end, at = 0, 0
    for start, stop, this in sorted(spans):
        if start < end:
            movable.pop(at, None)
            movable.pop(this, None)
        if stop > end:
            end, at = stop, this
    return set(movable)
