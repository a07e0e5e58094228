"""The step that all fused optimizers share: states as PyTorch keeps them, and one launch for all tensors of a kind."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from bagua_kernels.compression.block import BlockCodec
from bagua_kernels.launchers import multitensor
from bagua_kernels.launchers.multitensor import AVERAGE, COMPENSATION, FACTOR, MASTER, SCALARS
from bagua_kernels.optim.clipping import total_norm
from bagua_kernels.optim.compressed import Encoded, take_step
from bagua_kernels.optim.extras import Extras
from bagua_kernels.optim.plan import CannotFuseError, Group, Launch, Plan, Update

logger = logging.getLogger(__name__)

HALVES = (torch.bfloat16, torch.float16)
MASK = 0xFFFFFFFF
DRAWS = "draws"


class Counters(dict[str, Any]):
    """Values of counters by name: floats, or float64 tensors with one element a parameter.

    Attributes:
        dtype: as which the state keeps them.
    """

    dtype: torch.dtype


class Fused(Optimizer):
    """A mixin before an optimizer class: its constructor, states and checkpoints stay, its `step` becomes one pass.

    A subclass says which rule updates a group (`_update`) and what its scalars are (`_advance`).

    Attributes beside those of `torch.optim`: `clip_grad_norm_`, and the constructor's `extras`, see
    `bagua_kernels.optim.Extras`. Gradients are only read, also under `torch.amp.GradScaler`.
    """

    _fuses = True
    # Asks GradScaler for its scale and its verdict, instead of a pass of its own over the gradients.
    _step_supports_amp_scaling = True
    # Whether a step needs no more of the gradients than where they lie.
    _by_address = True
    _plan: Plan | None = None
    _extras: Extras = Extras()
    _clipping: Tensor | None = None
    _encoded: Encoded | None = None
    _reported: str | None = None

    def __init__(self, *arguments: Any, extras: Extras | None = None, **options: Any) -> None:
        self._extras = extras or Extras()
        super().__init__(*arguments, **options)
        # The compiler is loaded here, not in the first step.
        for device in {p.device for group in self.param_groups for p in group["params"]}:
            if device.type in ("cpu", "cuda"):
                multitensor.load_backend(device)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            return
        signature = inspect.signature(cls.__mro__[cls.__mro__.index(Fused) + 1])
        extras = inspect.Parameter("extras", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Extras | None)
        cls.__signature__ = signature.replace(parameters=[*signature.parameters.values(), extras])  # type: ignore[attr-defined]

    def _update(self, group: Group) -> Update:
        """The rule and states of a group."""
        raise NotImplementedError

    def _advance(self, group: Group, counters: Counters) -> tuple[Any, ...]:
        """Moves the counters to this step, and gives the rule's scalars.

        Args:
            group: options, as numbers; on a GPU those that are tensors stay tensors.
            counters: to be replaced by those of this step.
        """
        raise NotImplementedError

    @torch._disable_dynamo  # type: ignore[attr-defined]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient.

        Args:
            closure: evaluates the model anew and returns the loss.

        Returns:
            The closure's result; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        try:
            if any(group.get("differentiable") for group in self.param_groups):
                raise CannotFuseError("differentiable=True records every operation")
            if self._plan is None or not self._plan.matches(self):
                self._plan = Plan(self)
        except CannotFuseError as reason:
            self._plan = None
            self._leave_to_torch(str(reason), found_inf, grad_scale)
        else:
            self._run_plan(self._plan, found_inf, grad_scale)
        self._clipping = None
        return loss

    def _run_plan(self, plan: Plan, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        if found_inf is not None and any(not launch.on_device for launch in plan.launches) and found_inf.item():
            return
        for launch in plan.launches:
            launch.begin()
            if launch.on_device:
                rows, keys = self._rows_on_device(launch, found_inf, grad_scale)
            else:
                rows, keys = self._rows(launch, grad_scale)
            if self._encoded is None:
                self._launch(launch, rows, keys)
            else:
                self._encoded.apply(launch, rows)
            launch.end()
        # Kernels write through addresses, of which autograd's check for values changed too early knows nothing.
        torch.autograd.graph.increment_version(plan.changed)

    def _launch(self, launch: Launch, rows: Any, keys: Any) -> None:
        multitensor.launch(launch.variant, launch.table, rows, keys)

    def _rows(self, launch: Launch, grad_scale: Tensor | None) -> tuple[Any, Any]:
        """The kernel's scalars for each tensor, from counters on the host."""
        rows, scalars = launch.rows, slice(SCALARS, SCALARS + launch.variant.scalars)
        factor = 1.0 if grad_scale is None else 1.0 / float(grad_scale)
        if self._clipping is not None:
            factor *= float(self._clipping)
        keys = self._keys(launch, launch.numbers.get(DRAWS))
        for group, begin, end in launch.spans:
            options = as_numbers(group)
            rows[begin:end, FACTOR] = -factor if options.get("maximize") else factor
            if AVERAGE in launch.variant.extras:
                rows[begin:end, scalars.stop] = 1.0 - float(self._extras.average or 0.0)
            numbers = {name: values[begin:end] for name, values in launch.numbers.items()}
            for members in alike(list(numbers.values())):
                counters = Counters({name: float(values[members][0]) for name, values in numbers.items()})
                counters.dtype = launch.precision
                rows[begin:end, scalars][members] = self._count(options, counters)
                for name, values in numbers.items():
                    values[members] = counters[name]
        return rows, keys

    def _rows_on_device(self, launch: Launch, found_inf: Tensor | None, grad_scale: Tensor | None) -> tuple[Any, Any]:
        """The same from counters on a GPU, without waiting for it, and so that a CUDA graph can replay it."""
        device = launch.table.device

        def column(value: Any, length: int) -> Tensor:
            if isinstance(value, Tensor):
                return value.to(device, torch.float64).reshape(-1).expand(length)
            return torch.full((length,), float(value), dtype=torch.float64, device=device)

        skip = column(0.0 if found_inf is None else found_inf, 1)
        factor = column(1.0 if grad_scale is None else grad_scale, 1).reciprocal()
        if self._clipping is not None:
            factor = factor * self._clipping
        keys = self._keys(launch, launch.counters.get(DRAWS))
        parts = []
        for group, begin, end in launch.spans:
            old = {name: values[begin:end].double() for name, values in launch.counters.items()}
            counters = Counters(old)
            counters.dtype = launch.precision
            scalars = self._count(group, counters)
            rate = [1.0 - float(self._extras.average or 0.0)] if AVERAGE in launch.variant.extras else []
            values = [-factor if group.get("maximize") else factor, skip, *scalars, *rate]
            parts.append(torch.stack([column(value, end - begin) for value in values], 1))
            for name, flat in launch.counters.items():
                flat[begin:end] = torch.where(skip != 0, old[name], counters[name])
        return torch.cat(parts).to(torch.float64 if launch.variant.double else torch.float32), keys

    def _count(self, group: Mapping[str, Any], counters: Counters) -> tuple[Any, ...]:
        if DRAWS in counters:
            counters[DRAWS] = counters[DRAWS] + 1
        return self._advance(dict(group), counters)

    def _keys(self, launch: Launch, draws: Any) -> Any:
        """Seeds of stochastic rounding: of each parameter's number, and of how often it was rounded."""
        if not launch.variant.stochastic:
            return None
        first = (launch.positions + self._extras.seed * 0x9E3779B9) & MASK
        if isinstance(draws, Tensor):
            low = torch.from_numpy(first.astype(np.uint32).view(np.int32)).to(draws.device)
            return torch.stack([low, draws.to(torch.int32)], 1)
        return np.stack([first, draws], 1).astype(np.uint32)

    def _prepare(self, group: Group) -> set[int]:
        """Makes missing states of a group's parameters that have a gradient, and tells which were missing, by `id`."""
        update = self._update(group)
        wanted = [name for name in (*update.states, *update.counters) if not name.startswith("_")]
        active = [p for p in group["params"] if p.grad is not None]
        fresh = {id(p) for p in active if any(self.state.get(p, {}).get(name) is None for name in wanted)}
        make = getattr(super(), "_init_group", None)
        if make is not None:
            # PyTorch's own, with its errors; the lists that it fills follow the group.
            make(group, *([] for _ in range(len(inspect.signature(make).parameters) - 1)))
        for p in active:
            if id(p) in fresh:
                for name in update.states:
                    if self.state[p].get(name) is None:
                        self.state[p][name] = torch.zeros_like(p, memory_format=torch.preserve_format)
                for name in update.counters:
                    if not name.startswith("_"):
                        self.state[p].setdefault(name, torch.zeros((), dtype=torch.get_default_dtype()))
            self._prepare_extras(p)
        return fresh

    def _prepare_extras(self, parameter: Tensor) -> None:
        names, _ = self._extra_columns(parameter)
        for name in names:
            if name in self.state[parameter]:
                continue
            if name == COMPENSATION:
                made = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            else:
                wide = parameter.dtype if parameter.dtype == torch.float64 else torch.float32
                made = parameter.detach().to(wide, copy=True, memory_format=torch.preserve_format)
            self.state[parameter][name] = made

    def _extra_columns(self, parameter: Tensor) -> tuple[tuple[str, ...], bool]:
        """The names of the extra states of a parameter, and whether it is rounded at random."""
        precision = self._extras.precision if parameter.dtype in HALVES else "nearest"
        names = {"master": (MASTER,), "kahan": (COMPENSATION,)}.get(precision, ())
        if self._extras.average is not None:
            if parameter.is_complex():
                raise TypeError(f"a running mean is kept of real parameters only, got {parameter.dtype}")
            names = (*names, AVERAGE)
        return names, precision == "stochastic"

    def _leave_to_torch(self, reason: str, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        """Takes the step in PyTorch's own way."""
        step = getattr(super(), "step", None)
        if step is None or step.__func__ is Optimizer.step:
            raise RuntimeError(
                f"{type(self).__name__} cannot take this step, since {reason}, and PyTorch has no other way"
            )
        if self._extras != Extras():
            raise RuntimeError(f"{type(self).__name__} cannot take this step with {self._extras}, since {reason}")
        if self._reported != reason:
            self._reported = reason
            logger.warning("%s: PyTorch's own step is used, since %s", type(self).__name__, reason)
        if found_inf is not None and found_inf.item():
            return
        factor = None if grad_scale is None else grad_scale.double().reciprocal()
        if self._clipping is not None:
            factor = self._clipping if factor is None else factor * self._clipping
        held: dict[str, Any] = {
            name: vars(self).pop(name) for name in ("found_inf", "grad_scale") if name in vars(self)
        }
        try:
            if factor is not None:
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            p.grad.mul_(factor.to(p.grad.device, torch.float32))
            # The hooks are running already: around this step, by the wrapper that PyTorch puts around every class's own.
            function = step.__func__
            (function.__wrapped__ if getattr(function, "hooked", False) else function)(self)
        finally:
            vars(self).update(held)

    def step_from_encoded(self, codec: BlockCodec, payloads: Mapping[Tensor, Tensor], scale: float = 1.0) -> None:
        """Takes a step from gradients that are still encoded: decodes and updates in one pass.

        Hooks run as in `step`. Parameters without a payload are skipped; nobody's `grad` is read or changed.

        Args:
            codec: what encoded them.
            payloads: for each parameter, shape (ranks, `codec.payload_size(parameter.numel())`), uint8. Several are added up.
            scale: factor of the sum; 1 / ranks for the mean.

        Raises:
            ValueError: a payload is for a parameter that the optimizer does not have, or has a wrong size.
            RuntimeError: the optimizer needs norms of gradients, has `extras`, counts steps on a GPU, or a parameter is not
                contiguous or has 64 bits.
        """
        if type(self)._launch is not Fused._launch:
            raise RuntimeError(f"{type(self).__name__} needs more than one pass over the gradients; decode them before")
        self._encoded = Encoded(codec, payloads, scale)
        try:
            take_step(self, self._encoded, self.step)
        finally:
            self._encoded = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
        """Lets the next step scale the gradients so that their total norm is at most `max_norm`; they are not changed.

        Costs one pass that reads them, where `torch.nn.utils.clip_grad_norm_` makes three. With a GradScaler, call its
        `unscale_` before.

        Args:
            max_norm: of all gradients together, the Euclidean one.
            error_if_nonfinite: whether to raise if the norm is inf or NaN.

        Returns:
            The norm, shape (), float64.

        Raises:
            RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
        """
        norm = total_norm([p.grad for group in self.param_groups for p in group["params"] if p.grad is not None])
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"the total norm of the gradients is {norm.item()}; set error_if_nonfinite=False to go on"
            )
        self._clipping = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_extras": self._extras}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._plan = None
        super().__setstate__(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave, here or in `torch.optim`.

        Args:
            state_dict: of this optimizer, or of PyTorch's of the same name.
        """
        super().load_state_dict(state_dict)
        # PyTorch casts states to the parameter's dtype, which is what these are there to be wider than.
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved, params, strict=True):
            for name in (MASTER, AVERAGE):
                value = state_dict["state"].get(index, {}).get(name)
                if value is not None:
                    self.state[p][name] = value.to(p.device, copy=True)


def as_numbers(group: Group) -> Group:
    """The options of a group with tensors of one element as numbers."""
    if not any(isinstance(value, (Tensor, tuple)) for value in group.values()):
        return group

    def number(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(number(v) for v in value)
        return value.item() if isinstance(value, Tensor) else value

    return {name: value if name == "params" else number(value) for name, value in group.items()}


def alike(columns: list[Any]) -> list[Any]:
    """Which parameters have the same counters: indices for each set of them, a slice if it is all."""
    if all((column == column[0]).all() for column in columns):
        return [slice(None)]
    _, inverse = np.unique(np.stack(columns, 1), axis=0, return_inverse=True)
    return [np.flatnonzero(inverse.reshape(-1) == k) for k in range(int(inverse.max()) + 1)]
