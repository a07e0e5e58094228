"""One optimizer step in float64, written from the update equations."""

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


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
    if maximize:
        g = -g
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    return p - lr * weight_decay * p - lr * m_hat / (np.sqrt(v_hat) + eps), m, v
