"""Optimizer steps in NumPy float64, written from the update equations of the papers and of torch's documentation.

`STEPS` has one function for each optimizer, by the name of its class. All are called alike: `step(p, g, state, t, **options)`
returns the new parameters, where `t` is 1 for the first step, and `state` is a dictionary, empty before the first step, with the
names that torch gives its state. Norms are those of the whole array.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
State = dict[str, F64]
Betas = tuple[float, float]


def sgd(
    p: F64,
    g: F64,
    buf: F64 | None,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> tuple[F64, F64 | None]:
    """Returns parameters and momentum buffer after one step of SGD as torch.optim.SGD defines it.

    Args:
        p: Parameters.
        g: Gradient.
        buf: Momentum buffer; None before the first step, which ignores `dampening`.
        lr: Learning rate.
        momentum: Momentum factor; 0 keeps no buffer.
        dampening: Part of the gradient that does not enter the buffer.
        weight_decay: L2 penalty, added to the gradient.
        nesterov: Looks one momentum step ahead.
        maximize: Ascends instead of descending; the penalty still pulls to zero.
    """
    d = (-g if maximize else g) + weight_decay * p
    if momentum == 0:
        return p - lr * d, buf
    new_buf = d if buf is None else momentum * buf + (1 - dampening) * d
    direction = d + momentum * new_buf if nesterov else new_buf
    return p - lr * direction, new_buf


def adamw(
    p: F64,
    g: F64,
    m: F64,
    v: F64,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    maximize: bool = False,
) -> tuple[F64, F64, F64]:
    """Returns parameters and both moments after one step of AdamW as torch.optim.AdamW defines it.

    Args:
        p: Parameters.
        g: Gradient.
        m: First moment, zero before the first step.
        v: Second moment, zero before the first step.
        step: Number of this step, 1 for the first.
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the corrected second moment.
        weight_decay: Decoupled: shrinks the parameters by `lr * weight_decay`.
        maximize: Ascends instead of descending; the decay still pulls to zero.
    """
    state = {"exp_avg": m, "exp_avg_sq": v}
    p = adamw_step(
        p, g, state, step, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, maximize=maximize
    )
    return p, state["exp_avg"], state["exp_avg_sq"]


def sgd_step(p: F64, g: F64, state: State, t: int, **options: Any) -> F64:
    p, buffer = sgd(p, g, state.get("momentum_buffer"), **options)
    if buffer is not None:
        state["momentum_buffer"] = buffer
    return p


def penalized(p: F64, g: F64, weight_decay: float, maximize: bool) -> F64:
    """Returns the gradient to descend along, with the L2 penalty."""
    return (-g if maximize else g) + weight_decay * p


def average(state: State, name: str, value: F64, decay: float) -> F64:
    """Returns the running average, which starts at zero, after `value` entered it."""
    state[name] = decay * state.get(name, np.zeros_like(value)) + (1 - decay) * value
    return state[name]


def adam_step(
    p: F64,
    g: F64,
    state: State,
    t: int,
    *,
    lr: float = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
) -> F64:
    g = penalized(p, g, 0.0 if decoupled_weight_decay else weight_decay, maximize)
    m = average(state, "exp_avg", g, betas[0])
    v = average(state, "exp_avg_sq", g**2, betas[1])
    if amsgrad:
        v = state["max_exp_avg_sq"] = np.maximum(state.get("max_exp_avg_sq", np.zeros_like(v)), v)
    m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    shrunk = p - lr * weight_decay * p if decoupled_weight_decay else p
    return shrunk - lr * m_hat / (np.sqrt(v_hat) + eps)


def adamw_step(p: F64, g: F64, state: State, t: int, *, weight_decay: float = 0.01, **options: Any) -> F64:
    return adam_step(p, g, state, t, weight_decay=weight_decay, decoupled_weight_decay=True, **options)


def nadam_step(
    p: F64,
    g: F64,
    state: State,
    t: int,
    *,
    lr: float = 2e-3,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> F64:
    g = penalized(p, g, 0.0 if decoupled_weight_decay else weight_decay, maximize)
    m = average(state, "exp_avg", g, betas[0])
    v_hat = average(state, "exp_avg_sq", g**2, betas[1]) / (1 - betas[1] ** t)
    mu, mu_next = (betas[0] * (1 - math.pow(0.96, i * momentum_decay) / 2) for i in (t, t + 1))
    state["mu_product"] = state.get("mu_product", np.ones(())) * np.asarray(mu)
    product = float(state["mu_product"])
    m_hat = mu_next * m / (1 - product * mu_next) + (1 - mu) * g / (1 - product)
    shrunk = p - lr * weight_decay * p if decoupled_weight_decay else p
    return shrunk - lr * m_hat / (np.sqrt(v_hat) + eps)


def radam_step(
    p: F64,
    g: F64,
    state: State,
    t: int,
    *,
    lr: float = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> F64:
    g = penalized(p, g, 0.0 if decoupled_weight_decay else weight_decay, maximize)
    m_hat = average(state, "exp_avg", g, betas[0]) / (1 - betas[0] ** t)
    v = average(state, "exp_avg_sq", g**2, betas[1])
    shrunk = p - lr * weight_decay * p if decoupled_weight_decay else p
    limit = 2 / (1 - betas[1]) - 1
    length = limit - 2 * t * betas[1] ** t / (1 - betas[1] ** t)
    if length <= 5:
        return shrunk - lr * m_hat
    rectification = math.sqrt((length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length))
    return shrunk - lr * rectification * m_hat * math.sqrt(1 - betas[1] ** t) / (np.sqrt(v) + eps)


def adamax_step(
    p: F64,
    g: F64,
    state: State,
    t: int,
    *,
    lr: float = 2e-3,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> F64:
    g = penalized(p, g, weight_decay, maximize)
    m = average(state, "exp_avg", g, betas[0])
    norm = state["exp_inf"] = np.maximum(betas[1] * state.get("exp_inf", np.zeros_like(g)), np.abs(g) + eps)
    return p - lr / (1 - betas[0] ** t) * m / norm


def adagrad_step(
    p: F64,
    g: F64,
    state: State,
    t: int,
    *,
    lr: float = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    maximize: bool = False,
) -> F64:
    g = penalized(p, g, weight_decay, maximize)
    state["sum"] = state.get("sum", np.full_like(g, initial_accumulator_value)) + g**2
    return p - lr / (1 + (t - 1) * lr_decay) * g / (np.sqrt(state["sum"]) + eps)


def adadelta_step(
    p: F64,
    g: F64,
    state: State,
    t: int,
    *,
    lr: float = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> F64:
    g = penalized(p, g, weight_decay, maximize)
    v = average(state, "square_avg", g**2, rho)
    delta = np.sqrt(state.get("acc_delta", np.zeros_like(g)) + eps) / np.sqrt(v + eps) * g
    average(state, "acc_delta", delta**2, rho)
    return p - lr * delta


def rmsprop_step(
    p: F64,
    g: F64,
    state: State,
    t: int,
    *,
    lr: float = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> F64:
    g = penalized(p, g, weight_decay, maximize)
    v = average(state, "square_avg", g**2, alpha)
    if centered:
        v = v - average(state, "grad_avg", g, alpha) ** 2
    update = g / (np.sqrt(v) + eps)
    if momentum > 0:
        update = state["momentum_buffer"] = momentum * state.get("momentum_buffer", np.zeros_like(g)) + update
    return p - lr * update


def rprop_step(
    p: F64,
    g: F64,
    state: State,
    t: int,
    *,
    lr: float = 1e-2,
    etas: tuple[float, float] = (0.5, 1.2),
    step_sizes: tuple[float, float] = (1e-6, 50.0),
    maximize: bool = False,
) -> F64:
    g = -g if maximize else g
    agreement = g * state.get("prev", np.zeros_like(g))
    factor = np.where(agreement > 0, etas[1], np.where(agreement < 0, etas[0], 1.0))
    size = state["step_size"] = np.clip(state.get("step_size", np.full_like(g, lr)) * factor, *step_sizes)
    state["prev"] = np.where(agreement < 0, 0.0, g)
    return p - np.sign(state["prev"]) * size


def asgd_step(
    p: F64,
    g: F64,
    state: State,
    t: int,
    *,
    lr: float = 1e-2,
    lambd: float = 1e-4,
    alpha: float = 0.75,
    t0: float = 1e6,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> F64:
    g = penalized(p, g, weight_decay, maximize)
    eta, mu = state.get("eta", lr), state.get("mu", 1.0)
    p = p - lambd * eta * p - eta * g
    average_before = state.get("ax", np.zeros_like(p))
    state["ax"] = average_before + mu * (p - average_before)
    state["eta"] = np.asarray(lr / (1 + lambd * lr * t) ** alpha)
    state["mu"] = np.asarray(1 / max(1.0, t - t0))
    return p


def lion_step(
    p: F64,
    g: F64,
    state: State,
    t: int,
    *,
    lr: float = 1e-4,
    betas: Betas = (0.9, 0.99),
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> F64:
    g = -g if maximize else g
    m = state.get("exp_avg", np.zeros_like(g))
    update = np.sign(betas[0] * m + (1 - betas[0]) * g)
    average(state, "exp_avg", g, betas[1])
    return (1 - lr * weight_decay) * p - lr * update


def lamb_step(
    p: F64,
    g: F64,
    state: State,
    t: int,
    *,
    lr: float = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> F64:
    g = -g if maximize else g
    m_hat = average(state, "exp_avg", g, betas[0]) / (1 - betas[0] ** t)
    v_hat = average(state, "exp_avg_sq", g**2, betas[1]) / (1 - betas[1] ** t)
    r = m_hat / (np.sqrt(v_hat) + eps) + weight_decay * p
    p_norm, r_norm = np.sqrt(np.sum(p**2)), np.sqrt(np.sum(r**2))
    trust = p_norm / r_norm if p_norm > 0 and r_norm > 0 else 1.0
    return p - lr * trust * r


def lars_step(
    p: F64,
    g: F64,
    state: State,
    t: int,
    *,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust_coefficient: float = 0.001,
    eps: float = 1e-8,
    dampening: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> F64:
    g = -g if maximize else g
    p_norm, g_norm = np.sqrt(np.sum(p**2)), np.sqrt(np.sum(g**2))
    both = p_norm > 0 and g_norm > 0
    local = trust_coefficient * p_norm / (g_norm + weight_decay * p_norm + eps) if both else 1.0
    d = local * (g + weight_decay * p)
    return sgd_step(p, d, state, t, lr=lr, momentum=momentum, dampening=dampening, nesterov=nesterov)


STEPS: dict[str, Callable[..., F64]] = {
    "SGD": sgd_step,
    "Adam": adam_step,
    "AdamW": adamw_step,
    "NAdam": nadam_step,
    "RAdam": radam_step,
    "Adamax": adamax_step,
    "Adagrad": adagrad_step,
    "Adadelta": adadelta_step,
    "RMSprop": rmsprop_step,
    "Rprop": rprop_step,
    "ASGD": asgd_step,
    "Lion": lion_step,
    "LAMB": lamb_step,
    "LARS": lars_step,
}
