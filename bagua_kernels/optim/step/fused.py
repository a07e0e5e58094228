"""The step that all fused optimizers share: states as PyTorch keeps them, and one launch for all tensors of a kind."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from bagua_kernels.caller_warnings import warn_caller
from bagua_kernels.compression.block import BlockCodec
from bagua_kernels.launchers import multitensor
from bagua_kernels.optim.step.clipping import total_norm
from bagua_kernels.optim.step.compressed import Encoded, PayloadStep
from bagua_kernels.optim.step.extras import Extras
from bagua_kernels.optim.step.launch import Launch
from bagua_kernels.optim.step.launches import Launches
from bagua_kernels.optim.step.scalars import Scalars
from bagua_kernels.optim.step.states import States
from bagua_kernels.optim.step.update import CannotFuseError
from bagua_kernels.optim.step.watched import is_watched
from bagua_kernels.options import check_options, hints_of

logger = logging.getLogger(__name__)


class Fused(States):
    """A mixin before an optimizer class: its constructor, states and checkpoints stay, its `step` becomes one pass.

    A subclass defines the rule (`_rule`, or `_update` by group) and its scalars (`_advance`), see `States`.

    Attributes beside those of `torch.optim`: `clip_grad_norm_`, and the constructor's `extras`, see
    `bagua_kernels.optim.Extras`. Gradients are only read, also under `torch.amp.GradScaler`.
    """

    _fuses = True
    _launches: Launches | None = None
    _clipping: Tensor | None = None
    _encoded: Encoded | None = None
    _starts: Mapping[Tensor, Tensor] | None = None
    _reported: str | None = None

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        init = cls.__dict__.get("__init__")
        if init is not None and init.__module__.startswith(f"{__name__.partition('.')[0]}.optim."):
            cls.__init__ = _checked(init)  # type: ignore[method-assign]

    def __init__(self, *arguments: Any, extras: Extras | None = None, **options: Any) -> None:
        self._extras = extras or Extras()
        parent = type(self).__mro__[type(self).__mro__.index(States) + 1]
        known = inspect.signature(parent).parameters
        # Not every version of PyTorch has all of them.
        lacking = [name for name, value in options.items() if name not in known and (value is None or value is False)]
        super().__init__(*arguments, **{name: value for name, value in options.items() if name not in lacking})
        # The compiler is loaded here, not in the first step.
        for device in {p.device for group in self.param_groups for p in group["params"]}:
            if device.type in ("cpu", "cuda"):
                multitensor.load_backend(device)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True to be asked by `GradScaler` for its verdict, so that it does not write unscaled gradients in a pass of its own.

        It then calls `step` in any case. Where others watch steps, and PyTorch's optimizer would not be called for a step that is
        left out, this is False: the scaler divides the gradients, and decides.
        """
        if any(group.get("fused") or group.get("capturable") for group in self.param_groups):
            return True
        # Gradients in float16 are what a scaler refuses to divide.
        half = any(p.dtype == torch.float16 for group in self.param_groups for p in group["params"])
        return half or not is_watched(self)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, _: bool) -> None:
        """Does nothing: constructors of PyTorch set it for `fused=True`, which is in the groups."""

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
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if "capturable" in self.defaults:
                capture_check(self)()
            if self._starts is not None:
                for p, start in self._starts.items():
                    p.copy_(start)
            if self._encoded is not None:
                self._step_from(self._encoded)
            else:
                self._step()
        finally:
            self._clipping = self._starts = None
        return loss

    def _step(self) -> None:
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        self._made = []
        ran = False
        try:
            if any(group.get("differentiable") for group in self.param_groups):
                raise CannotFuseError("differentiable=True records every operation")
            if self._launches is None or not self._launches.matches(self):
                self._launches = None
                self._launches = Launches(self)
            ran = self._run(self._launches, found_inf, grad_scale)
        except CannotFuseError as reason:
            self._launches = None
            self._unmake()
            self._leave_to_torch(str(reason), found_inf, grad_scale)
            ran = True
        finally:
            if self._launches is not None:
                self._launches.end()
            if not ran:
                self._unmake()

    def _run(self, launches: Launches, found_inf: Tensor | None, grad_scale: Tensor | None) -> bool:
        """Runs all launches, unless a gradient is known to be infinite; returns True if it did."""
        on_host = any(not launch.on_device for launch in launches.each)
        # waits: steps that are counted on the host must not count a skipped one; `fused=True` counts on the GPU.
        if found_inf is not None and on_host and found_inf.item():
            return False
        due = [launch for launch in launches.each if launch.missing is None or not launch.missing.all()]
        # An error in one leaves everything as it was.
        prepared = list(map(self._scalars(found_inf, grad_scale).rows, due))
        for launch, (rows, keys, counted) in zip(due, prepared, strict=True):
            launch.begin()
            self._launch(launch, rows, keys)
            launch.store()
            launch.count(counted)
        # Kernels write through addresses, of which autograd's check for values changed too early knows nothing.
        torch.autograd.graph.increment_version(launches.updated())
        return True

    def _scalars(self, found_inf: Tensor | None = None, grad_scale: Tensor | None = None) -> Scalars:
        average = float(self._extras.average or 0.0)
        return Scalars(self._advance, average, self._extras.seed, grad_scale, self._clipping, found_inf)

    def _launch(self, launch: Launch, rows: Any, keys: Any) -> None:
        multitensor.launch(launch.variant, launch.table, rows, keys)

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
        # waits: PyTorch's own step takes no scaler.
        if found_inf is not None and found_inf.item():
            return
        factor = None if grad_scale is None else grad_scale.double().reciprocal()
        if self._clipping is not None:
            factor = self._clipping if factor is None else factor * self._clipping
        held: dict[str, Any] = {
            name: vars(self).pop(name) for name in ("found_inf", "grad_scale") if name in vars(self)
        }
        params = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad for p in params]
        try:
            if factor is not None:
                for p in params:
                    if p.grad is not None:
                        p.grad = p.grad * factor.to(p.grad.device, torch.float32)
            # The hooks are running already: around this step, by the wrapper that PyTorch puts around every class's own.
            function = step.__func__
            (function.__wrapped__ if getattr(function, "hooked", False) else function)(self)
        finally:
            vars(self).update(held)
            if factor is not None:
                for p, gradient in zip(params, gradients, strict=True):
                    p.grad = gradient

    def start_from(self, starts: Mapping[Tensor, Tensor]) -> None:
        """Deprecated: lets the next step copy values to their parameters, before it updates them.

        Args:
            starts: by parameter, tensors of its shape, dtype and device. They must not change before the step.

        Raises:
            ValueError: a parameter is in no group, or a tensor has another shape, dtype or device.
        """
        warn_caller("start_from goes with the next release: copy the values to the parameters just before step()")
        known = {id(p) for group in self.param_groups for p in group["params"]}
        for p, start in starts.items():
            if id(p) not in known:
                raise ValueError(f"a start is for a parameter of shape {tuple(p.shape)} that is in no group")
            if (start.shape, start.dtype, start.device) != (p.shape, p.dtype, p.device):
                raise ValueError(
                    f"a start must be {p.dtype} of shape {tuple(p.shape)} on {p.device} as its parameter, got {start.dtype} "
                    f"of shape {tuple(start.shape)} on {start.device}"
                )
        self._starts = dict(starts)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, and how they were to be clipped."""
        self._clipping = None
        super().zero_grad(set_to_none)

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
        self._encoded = Encoded(codec, payloads, scale)
        try:
            self.step()
        finally:
            self._encoded = None

    def _step_from(self, encoded: Encoded) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        if type(self)._launch is not Fused._launch or self._extras != Extras():
            raise RuntimeError(
                f"{type(self).__name__} with {self._extras} needs more of a gradient than an encoded one has; decode it before"
            )
        encoded.check(params)
        if any(group.get("differentiable") for group in self.param_groups):
            raise RuntimeError(f"{type(self).__name__} cannot step from encoded gradients with differentiable=True")
        self._made = []
        ran = False
        try:
            with encoded.standing_for_gradients(params):
                launches = Launches(self)
            if any(launch.on_device for launch in launches.each):
                raise RuntimeError(
                    "a step from encoded gradients counts on the host; set fused and capturable to False"
                )
            prepared = list(map(self._scalars().rows, launches.each))
            step = PayloadStep(encoded.codec, launches.each, [rows for rows, _, _ in prepared])
            for parameter, payloads in encoded.payloads.items():
                step.apply(parameter, payloads, scale=encoded.scale)
            for launch, (_, _, counted) in zip(launches.each, prepared, strict=True):
                launch.count(counted)
            ran = True
        except CannotFuseError as reason:
            raise RuntimeError(f"{type(self).__name__} cannot step from encoded gradients, since {reason}") from None
        finally:
            if not ran:
                self._unmake()
        torch.autograd.graph.increment_version(launches.params)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
        """Lets the next step scale the gradients so that their total norm is at most `max_norm`; they are not changed.

        Costs one pass that reads them, where `torch.nn.utils.clip_grad_norm_` makes three. With a GradScaler, call its
        `unscale_` before.

        Args:
            max_norm: of all gradients together, the Euclidean one.
            error_if_nonfinite: True to raise an error if the norm is inf or NaN.

        Returns:
            The norm, shape (), float64.

        Raises:
            RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
        """
        norm = total_norm([p.grad for group in self.param_groups for p in group["params"] if p.grad is not None])
        # waits: the caller asks for an error.
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                # waits: the caller asks for an error.
                f"the total norm of the gradients is {norm.item()}; set error_if_nonfinite=False to go on"
            )
        self._clipping = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._launches = None
        super().__setstate__(state)


def capture_check(optimizer: Optimizer) -> Callable[[], None]:
    """PyTorch's refusal of steps that a CUDA graph would not replay."""
    name = "_accelerator_graph_capture_health_check"
    check = getattr(optimizer, name, None) or optimizer._cuda_graph_capture_health_check
    return cast(Callable[[], None], check)


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    """Makes a constructor check the numbers among its options, behind PyTorch's checks, whose messages stay."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        check_options(hints_of(init), type(self).__name__, signature.bind(self, *args, **kwargs).arguments)

    return call
