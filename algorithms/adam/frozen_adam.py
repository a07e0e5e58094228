"""Adam whose second moment freezes: the optimizer of QAdam and 1-bit Adam."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from bagua_kernels.caller_warnings import warn_caller
from bagua_kernels.optim.step.fused import Fused
from bagua_kernels.optim.step.scalars import Counters
from bagua_kernels.optim.step.update import Group, Update
from bagua_kernels.optim.step.validation import check_betas, check_not_negative
from bagua_kernels.quotient import divide_
from bagua_kernels.rules.optimizers import ADAM
from bagua_kernels.suggestions import did_you_mean

# "frozen" is for trainings that began with it: v is divided by c once, so that steps keep their length.
Correction = Literal["continued", "none", "frozen"]
_OFFERED = ("continued", "none")
UPDATE = Update(ADAM, ("exp_avg", "exp_avg_sq"), ("step",))

# From this ratio on two norms of v, a time constant apart, count as equal.
_STABLE = 0.96
_LOOKS = 10  # within a time constant: a look reads v, and waits for the device


class FrozenAdam(Fused, torch.optim.Optimizer):
    """AdamW in one pass, whose second moment v stops changing after a number of steps.

    1. Up to the freeze: AdamW (Loshchilov and Hutter, ICLR 2019, algorithm 2); without weight decay that is Adam.
    2. After step number `freeze_step`, v does not change any more. "auto" freezes v when it has become stable (after 1-bit
       Adam, Tang et al., ICML 2021). It is stable if its bias-corrected L1 norm is within 4 % of its norm 1 / (1 - beta2)
       steps before. As many steps must have come before that.
    3. From then on: p = p - lr weight_decay p; m = beta1 m + (1 - beta1) g; p = p - lr m / (1 - beta1^t) /
       (sqrt(v / c) + eps).

    `v_correction` chooses v's bias correction c = 1 - beta2^t after the freeze:

    - "continued": t goes on, so that c approaches 1 and steps grow slowly, by 1 / sqrt(1 - beta2^freeze_step) in the end.
      That makes up for gradients which get smaller in training while v does not.
    - "none": c is 1 from then on, as in 1-bit Adam's paper: steps grow as much at once.

    A part s of v is the square of gradients without noise. The rest is the variance of noise, which for a mean over fewer
    ranks is larger. Where the number of ranks changes after the freeze from n to k, v counts as v (s + (1 - s) n / k).
    When v freezes, s is estimated for all elements together, as (q - d) / (1 - d) between 0 and 1. Here q is the sum of
    squared m over that of v, with bias corrections. The variance of m adds d to it, which is
    (1 - beta1) (1 + beta1^t) / ((1 + beta1) (1 - beta1^t)).

    Steps that are not taken, such as those in which a `GradScaler` finds infinities, do not count. The freeze is part
    of the state, in the parameter groups.

    Attributes:
        freeze_step: number of steps after which v freezes; "auto", or None for never.
        agree: called with True if v is stable on this rank; returns the answer for all ranks.
        ranks: how many have the gradients whose mean is in `grad`.
        knows_scale: True if the code that makes the gradients knows of a `GradScaler`; else steps under one are refused.
    """

    # Copies have these, and ask no other ranks.
    freeze_step: int | Literal["auto"] | None = None
    v_correction: Correction = "continued"
    agree: Callable[[bool], bool] = bool
    ranks: int = 1
    knows_scale: bool = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int | Literal["auto"] | None = None,
        v_correction: Correction = "continued",
    ) -> None:
        """As `torch.optim.AdamW`, except for the weight decay's default and what is not there.

        Args:
            params: parameters, or groups of them with options of their own.
            lr: the learning rate.
            betas: decay of m and of v.
            eps: added to the root of v.
            weight_decay: decoupled, before and after the freeze.
            freeze_step: see above, 1 or more.
            v_correction: see above.

        Raises:
            ValueError: a number is out of its range.
        """
        if freeze_step not in (None, "auto") and not (isinstance(freeze_step, int) and freeze_step >= 1):
            raise ValueError(f'freeze_step must be an integer of at least 1, or "auto", or None, got {freeze_step!r}')
        if v_correction not in get_args(Correction):
            raise ValueError(
                f"v_correction must be one of {_OFFERED}, got {v_correction!r}{did_you_mean(v_correction, _OFFERED)}"
            )
        if v_correction not in _OFFERED:
            warn_caller(
                f"v_correction={v_correction!r} is only for trainings that began with it: leave it out in new ones, whose steps "
                "then grow as Adam's do"
            )
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        self.freeze_step = freeze_step
        self.v_correction = v_correction
        options: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "frozen": False,
            "v_correction": v_correction,
            "norms": [],
            "ranks": 0,
            "signal": 0.0,
        }
        super().__init__(params, options)
        for group in self.param_groups:
            check_betas(group["betas"])

    @property
    def frozen(self) -> bool:
        """True if v is frozen."""
        return bool(self.param_groups[0]["frozen"])

    def _update(self, group: Group) -> Update:
        return UPDATE

    def _advance(self, group: Group, counters: Counters) -> dict[str, Any]:
        step = counters["step"] = counters["step"] + 1
        beta1, beta2 = group["betas"]
        corrects = not group["frozen"] or group["v_correction"] == "continued"
        still, root = 1.0 if group["frozen"] else beta2, (1 - beta2**step) ** 0.5 if corrects else 1.0
        # 0 where v is not frozen, or by a version that did not count.
        if group["ranks"]:
            root /= (group["signal"] + (1 - group["signal"]) * group["ranks"] / self.ranks) ** 0.5
        decay = 1 - group["lr"] * group["weight_decay"]
        return {
            "weight_decay": 0.0,
            "decay": decay,
            "rate1": 1 - beta1,
            "beta2": still,
            "rate2": 1 - still,
            "eps": group["eps"],
            "step_size": group["lr"] / (1 - beta1**step),
            "root_bias2": root,
        }

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True: its step looks at what the scaler found, which a hook does not change."""
        return True

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, _: bool) -> None: ...

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient, and then maybe freezes v.

        Args:
            closure: evaluates the model anew and returns the loss.

        Returns:
            The closure's result; None without one.

        Raises:
            RuntimeError: a `GradScaler` has scaled the gradients, of which their algorithm does not know.
        """
        if getattr(self, "found_inf", None) is not None and not self.knows_scale:
            raise RuntimeError(
                "gradients are scaled by a GradScaler, whose scale is needed to average momenta: pass it to the "
                "algorithm's constructor as scaler=…"
            )
        before = self._steps()
        loss = super().step(closure)
        if self.freeze_step is not None and not self.frozen and (steps := self._steps()) > before:
            due = self._agreed_stable(steps) if isinstance(self.freeze_step, str) else steps >= self.freeze_step
            if due:
                self.freeze()
        return loss

    @torch.no_grad()
    def freeze(self) -> None:
        """Freezes v now; on all ranks alike."""
        if self.frozen:
            return
        for group in self.param_groups:
            group["frozen"], group["ranks"], group["signal"] = True, self.ranks, self._signal(group)
            if group["v_correction"] != "frozen":
                continue
            for state in self._states(group):
                divide_(state["exp_avg_sq"], 1 - float(group["betas"][1]) ** float(state["step"]))

    def _signal(self, group: Group) -> float:
        """Returns which part of v is no variance, see the class; the same bits on all ranks, whose m and v are the same."""
        states, (beta1, beta2) = [state for state in self._states(group) if state["exp_avg"].numel()], group["betas"]
        first = _sum(lambda: (state["exp_avg"].double().square() for state in states))
        second = _sum(lambda: (state["exp_avg_sq"] for state in states))
        if not (second > 0 and math.isfinite(first + second)):
            return 0.0
        step = max(float(state["step"]) for state in states)
        ratio = first / second * (1 - beta2**step) / (1 - beta1**step) ** 2
        own = (1 - beta1) / (1 + beta1) * (1 + beta1**step) / (1 - beta1**step)
        # After one step nothing is known.
        return float(min(max((ratio - own) / (1 - own), 0.0), 1.0)) if step > 1 and own < 1 else 0.0

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
        """As `Fused.clip_grad_norm_`; after the freeze, bounds the norm of the momentum which these gradients lead to.

        Clipped gradients bound that norm, too. In gradients that were averaged as momenta, the error of the encoding is
        1 / (1 - beta1) times as large. Most of their own norm is therefore error.

        Args:
            max_norm: of all gradients, or of all momenta, together.
            error_if_nonfinite: True to raise if the norm is inf or NaN.

        Returns:
            The norm before, shape ().

        Raises:
            RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
        """
        if not self.frozen:
            return super().clip_grad_norm_(max_norm, error_if_nonfinite)
        found = [
            (p.grad, self.state[p]["exp_avg"], float(group["betas"][0]))
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and "exp_avg" in self.state.get(p, {})
        ]
        momenta = [torch.lerp(m.float(), g.float(), 1 - beta) for g, m, beta in found]
        norm = torch.nn.utils.get_total_norm(momenta, error_if_nonfinite=error_if_nonfinite)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for (g, m, beta), momentum in zip(found, momenta, strict=True):
            # What is not to be clipped keeps its bits.
            clipped = divide_((momentum * factor).sub_(m, alpha=beta), 1 - beta)
            g.copy_(torch.where(factor < 1, clipped.to(g.dtype), g))
        return norm

    def __getstate__(self) -> dict[str, Any]:
        own = {"freeze_step": self.freeze_step, "v_correction": self.v_correction, "ranks": self.ranks}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # States of `torch.optim.Adam` know of no freeze, and in those without `v_correction` a frozen v is corrected.
        for group in self.param_groups:
            frozen = group.setdefault("frozen", False)
            group.setdefault("v_correction", "frozen" if frozen else self.v_correction)
            group.setdefault("norms", [])
            group.setdefault("ranks", 0)
            group.setdefault("signal", 0.0)

    def _states(self, group: Group) -> Iterator[dict[str, Any]]:
        return (self.state[p] for p in group["params"] if self.state.get(p))

    def _steps(self) -> int:
        """How many steps were taken; those of the parameter that took most."""
        if self.freeze_step is None or self.frozen:
            return 0
        return max((int(s["step"]) for group in self.param_groups for s in self._states(group)), default=0)

    def _agreed_stable(self, steps: int) -> bool:
        constant = max(round(1 / (1 - float(group["betas"][1]))) for group in self.param_groups)
        every = max(1, constant // _LOOKS)
        if steps < constant or steps % every:
            return False
        # A new list: the one there may be part of a checkpoint, or the default of all groups.
        norms = self.param_groups[0]["norms"] = [*self.param_groups[0]["norms"], self._norm()][-1 - constant // every :]
        if len(norms) <= constant // every:
            return False
        return self.agree(min(norms[0], norms[-1]) >= _STABLE * max(norms[0], norms[-1]))

    @torch.no_grad()
    def _norm(self) -> float:
        parts = [
            state["exp_avg_sq"].sum(dtype=torch.float64) / (1 - float(group["betas"][1]) ** float(state["step"]))
            for group in self.param_groups
            for state in self._states(group)
        ]
        # waits: norms decide once when v is frozen.
        return float(torch.stack([part.cpu() for part in parts]).sum())


def _sum(values: Callable[[], Iterable[Tensor]]) -> float:
    """Returns the sum of numbers that are not negative, by whole numbers: the order does not matter, nor how many threads add.

    Args:
        values: yields some of the numbers at a time.
    """
    # waits: once, when v freezes.
    told = [(float(each.max()), each.numel()) for each in values()]
    most = max((highest for highest, _ in told), default=0.0)
    if not (most > 0 and math.isfinite(most)):
        return most
    bits = 62 - sum(numel for _, numel in told).bit_length()
    unit = 2.0 ** (math.frexp(most)[1] - bits)
    # waits: likewise.
    return unit * sum(int((each.double() / unit).round().long().sum()) for each in values())
