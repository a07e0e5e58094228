"""Finds out whether an optimizer's steps call anything outside of it."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def is_watched(optimizer: Optimizer) -> bool:
    """Returns True if hooks run at an optimizer's steps, or its `step` was replaced, and steps left out are not for them.

    A learning rate schedule replaces `step` to warn of a wrong order of calls, which is not counted.

    Args:
        optimizer: whose steps they are. If a hook is a method of an object that has `counts_left_out` set to True, the
            hook has to run in every step: then the others run, too.
    """
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    if any(getattr(getattr(hook, "__self__", None), "counts_left_out", False) for hook in hooks):
        return False
    return bool(hooks) or _is_replaced(optimizer)


def _is_replaced(optimizer: Optimizer) -> bool:
    step: Any = vars(optimizer).get("step")
    if step is None:
        return False
    by_schedule = getattr(step, "_wrapped_by_lr_sched", False)
    return not (by_schedule and getattr(step, "__wrapped__", None) is type(optimizer).step)
