"""Optimizer updates of one element. Scalars that all elements share are finished on the host and passed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bagua_kernels.jit import vocabulary as tl
from bagua_kernels.jit.rule import called_rules


@dataclass(frozen=True)
class ElementwiseRule:
    """A rule over several flat arrays of one length; `bagua_kernels.launchers.elementwise` runs it.

    Attributes:
        name: lower-case identifier.
        function: (one value of each array, then scalars) -> the new values of the arrays in `writes`: a tuple, or the value
            itself if there is one.
        arrays: number of arrays.
        writes: the positions of the arrays that are overwritten, ascending.
    """

    name: str
    function: Callable[..., Any]
    arrays: int
    writes: tuple[int, ...]

    def __post_init__(self) -> None:
        called_rules(self.function)


def sgd(p, g, m, lr, momentum, undamped, weight_decay, nesterov):
    """Stochastic gradient descent with momentum (Sutskever et al., ICML 2013, in the form of `torch.optim.SGD`).

    `undamped` is 1 - dampening, and 1 at the first step; `nesterov` is 1 or 0. Returns (parameter, momentum buffer).
    """
    g = g + p * weight_decay
    m = m * momentum + g * undamped
    step = tl.where(nesterov > 0.5, g + m * momentum, m)
    return p - step * lr, m


def adamw(p, g, m, v, decay, rate1, beta2, rate2, eps, step_size, root_bias2):
    """AdamW (Loshchilov and Hutter, ICLR 2019, algorithm 2), one element.

    `decay` is 1 - lr * weight_decay, `rate1` 1 - beta1, `rate2` 1 - beta2, `step_size` lr / (1 - beta1^t) and `root_bias2`
    sqrt(1 - beta2^t): taken in float64 on the host, since 1 - 0.999 has lost four digits in float32.
    Returns (parameter, first moment, second moment).
    """
    p = p * decay
    m = m + (g - m) * rate1
    v = v * beta2 + g * g * rate2
    return p - tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root_bias2) + eps) * step_size, m, v


SGD = ElementwiseRule("sgd", sgd, arrays=3, writes=(0, 2))
ADAMW = ElementwiseRule("adamw", adamw, arrays=4, writes=(0, 2, 3))
