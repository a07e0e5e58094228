"""Optimizer updates of one element. Scalars that all elements share are finished on the host and passed in.

Every update rounds at the same places as `torch.optim`. PyTorch's `add(alpha=)`, `addcmul` and `lerp` round a product and
its sum once. `addcdiv` multiplies, divides and adds with a rounding each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bagua_kernels.rules import vocabulary as tl
from bagua_kernels.rules.calls import called_rules


@dataclass(frozen=True)
class ElementwiseRule:
    """A rule over several arrays of one length; `bagua_kernels.launchers.elementwise` and `…multitensor` run it.

    Attributes:
        name: lower-case identifier.
        function: (one value of each array, then scalars) -> the new values of the arrays in `writes`, then one term for each of
            the sums: a tuple, or the value itself if there is one.
        arrays: number of arrays.
        writes: the positions of the arrays that are overwritten, ascending.
        sums: number of sums over all elements that the rule gives terms of.
    """

    name: str
    function: Callable[..., Any]
    arrays: int
    writes: tuple[int, ...]
    sums: int = 0

    def __post_init__(self) -> None:
        called_rules(self.function)


def decayed(p, g, weight_decay):
    """The gradient of the loss with an L2 penalty. Without one, a parameter that is not finite must not touch it."""
    return tl.where(weight_decay != 0.0, tl.fma(p, weight_decay, g), g)


def lerp(start, end, weight):
    """`start + (end - start) * weight`, from the nearer end."""
    near = tl.fma(weight, end - start, start)
    far = tl.fma(weight - 1.0, end - start, end)
    return tl.where(tl.abs(weight) < 0.5, near, far)


def mean_square(v, g, beta, rate):
    """The running mean of squares, `rate` being 1 - beta."""
    return tl.fma(g * rate, g, v * beta)


def scaled(x, factor):
    """A product that no compiler contracts."""
    return x * factor


def approached(mean, x, rate):
    """A running mean, moved towards `x`."""
    return mean + (x - mean) * rate


def greater(x, y):
    """The greater of two floats; NaN if one is."""
    return tl.where(x > y, x, tl.where(x != x, x, y))


def sign(x):
    """1, 0 or -1; NaN gives 0."""
    return tl.where(x > 0.0, 1.0, 0.0) - tl.where(x < 0.0, 1.0, 0.0)


def plain_sgd(p, g, lr, weight_decay):
    """Gradient descent without momentum."""
    return tl.fma(decayed(p, g, weight_decay), -lr, p)


def sgd(p, g, m, lr, momentum, undamped, weight_decay, nesterov):
    """Stochastic gradient descent with momentum (Sutskever et al., ICML 2013, in the form of `torch.optim.SGD`).

    `undamped` is 1 - dampening, and 1 at the first step; `nesterov` is 1 or 0. Returns (parameter, momentum buffer).
    """
    g = decayed(p, g, weight_decay)
    m = tl.fma(g, undamped, m * momentum)
    step = tl.where(nesterov > 0.5, tl.fma(m, momentum, g), m)
    return tl.fma(step, -lr, p), m


def adam(p, g, m, v, weight_decay, decay, rate1, beta2, rate2, eps, step_size, root_bias2):
    """Adam (Kingma and Ba, ICLR 2015) and AdamW (Loshchilov and Hutter, ICLR 2019, algorithm 2).

    `weight_decay` is that of the L2 penalty; `decay` that of decoupled weight decay, 1 - lr * weight_decay; one of them is
    neutral. `rate1` is 1 - beta1, `rate2` 1 - beta2, `step_size` lr / (1 - beta1^t) and `root_bias2` sqrt(1 - beta2^t).
    They are computed in float64 on the host, because 1 - 0.999 loses four digits in float32. Returns (parameter, first
    moment, second moment).
    """
    g = decayed(p, g, weight_decay)
    p = p * decay
    m = lerp(m, g, rate1)
    v = mean_square(v, g, beta2, rate2)
    return p + tl.div_rn(m * -step_size, tl.div_rn(tl.sqrt_rn(v), root_bias2) + eps), m, v


def amsgrad(p, g, m, v, greatest, weight_decay, decay, rate1, beta2, rate2, eps, step_size, root_bias2):
    """Adam with the greatest second moment so far (Reddi et al., ICLR 2018)."""
    g = decayed(p, g, weight_decay)
    p = p * decay
    m = lerp(m, g, rate1)
    v = mean_square(v, g, beta2, rate2)
    greatest = greater(greatest, v)
    return p + tl.div_rn(m * -step_size, tl.div_rn(tl.sqrt_rn(greatest), root_bias2) + eps), m, v, greatest


def nadam(p, g, m, v, weight_decay, decay, rate1, beta2, rate2, eps, bias2, gradient_step, momentum_step):
    """Adam with Nesterov momentum (Dozat, 2016); the two steps hold the schedule of the momentum."""
    g = decayed(p, g, weight_decay)
    p = p * decay
    m = lerp(m, g, rate1)
    v = mean_square(v, g, beta2, rate2)
    root = tl.sqrt_rn(tl.div_rn(v, bias2)) + eps
    p = p + tl.div_rn(g * -gradient_step, root)
    return p + tl.div_rn(m * -momentum_step, root), m, v


def radam(p, g, m, v, weight_decay, decay, rate1, beta2, rate2, eps, lr, bias1, root_bias2, rectification):
    """Rectified Adam (Liu et al., ICLR 2020); `rectification` is 0 as long as the variance is intractable."""
    g = decayed(p, g, weight_decay)
    p = p * decay
    m = lerp(m, g, rate1)
    v = mean_square(v, g, beta2, rate2)
    step = tl.div_rn(m, bias1) * lr
    adaptive = tl.div_rn(1.0, tl.sqrt_rn(v) + eps) * root_bias2
    return p - tl.where(rectification > 0.0, step * adaptive * rectification, step), m, v


def adamax(p, g, m, u, weight_decay, rate1, beta2, eps, step_size):
    """Adam with the infinity norm (Kingma and Ba, ICLR 2015, section 7.1)."""
    g = decayed(p, g, weight_decay)
    m = lerp(m, g, rate1)
    u = greater(u * beta2, tl.abs(g) + eps)
    return p + tl.div_rn(m * -step_size, u), m, u


def adagrad(p, g, total, weight_decay, eps, step_size):
    """Adagrad (Duchi et al., JMLR 2011)."""
    g = decayed(p, g, weight_decay)
    total = tl.fma(g, g, total)
    return p + tl.div_rn(g * -step_size, tl.sqrt_rn(total) + eps), total


def adadelta(p, g, v, u, weight_decay, rho, rate, eps, lr):
    """Adadelta (Zeiler, 2012); `rate` is 1 - rho."""
    g = decayed(p, g, weight_decay)
    v = mean_square(v, g, rho, rate)
    delta = tl.div_rn(tl.sqrt_rn(u + eps), tl.sqrt_rn(v + eps)) * g
    u = mean_square(u, delta, rho, rate)
    return tl.fma(delta, -lr, p), v, u


def rmsprop(p, g, v, weight_decay, alpha, rate, eps, lr):
    """RMSprop (Hinton, 2012); `rate` is 1 - alpha."""
    g = decayed(p, g, weight_decay)
    v = mean_square(v, g, alpha, rate)
    return p + tl.div_rn(g * -lr, tl.sqrt_rn(v) + eps), v


def rmsprop_momentum(p, g, v, m, weight_decay, alpha, rate, eps, lr, momentum):
    """RMSprop with momentum."""
    g = decayed(p, g, weight_decay)
    v = mean_square(v, g, alpha, rate)
    m = m * momentum + tl.div_rn(g, tl.sqrt_rn(v) + eps)
    return tl.fma(m, -lr, p), v, m


def centered_root(v, mean):
    """The standard deviation, from the mean of squares and the mean."""
    return tl.sqrt_rn(tl.fma(-mean, mean, v))


def rmsprop_centered(p, g, v, mean, weight_decay, alpha, rate, eps, lr):
    """Centered RMSprop (Graves, 2013)."""
    g = decayed(p, g, weight_decay)
    v = mean_square(v, g, alpha, rate)
    mean = lerp(mean, g, rate)
    return p + tl.div_rn(g * -lr, centered_root(v, mean) + eps), v, mean


def rmsprop_centered_momentum(p, g, v, mean, m, weight_decay, alpha, rate, eps, lr, momentum):
    """Centered RMSprop with momentum."""
    g = decayed(p, g, weight_decay)
    v = mean_square(v, g, alpha, rate)
    mean = lerp(mean, g, rate)
    m = m * momentum + tl.div_rn(g, centered_root(v, mean) + eps)
    return tl.fma(m, -lr, p), v, mean, m


def rprop(p, g, previous, size, shrink, grow, least, most):
    """Resilient backpropagation (Riedmiller and Braun, 1993) without weight backtracking, as `torch.optim.Rprop`."""
    # NaN, also of infinity times zero, has no direction: neither size nor parameter may take it over.
    turn = g * previous
    factor = tl.where(turn > 0.0, grow, tl.where(turn < 0.0, shrink, 1.0))
    size = size * factor
    size = tl.where(size < least, least, tl.where(size > most, most, size))
    g = tl.where(factor == shrink, 0.0, g)
    return tl.fma(-sign(g), size, p), g, size


def asgd(p, g, average, weight_decay, decay, step_size, weight):
    """Averaged SGD (Polyak and Juditsky, 1992); `weight` is that of the newest point in the average."""
    g = decayed(p, g, weight_decay)
    p = tl.fma(g, -step_size, p * decay)
    # The average has part in the condition so that it is read in any case: a loop that only writes it, which the compiler makes
    # for a weight of 1, waits a third longer for memory. An average that is not finite must not decide.
    none = average - average
    whole = tl.where(none == none, weight + none, weight) == 1.0
    return p, tl.where(whole, p, average + (p - average) * weight)


def lion(p, g, m, decay, beta1, rate1, rate2, lr):
    """Lion (Chen et al., NeurIPS 2023, algorithm 2)."""
    direction = sign(tl.fma(g, rate1, m * beta1))
    return tl.fma(direction, -lr, p * decay), lerp(m, g, rate2)


def squared_norm(g):
    """A term of the squared norm."""
    return g * g


def norms(p, g):
    """Terms of the squared norms of parameter and gradient."""
    return p * p, g * g


def lamb_direction(p, g, m, v, weight_decay, rate1, beta2, rate2, eps, bias1, root_bias2):
    """LAMB's step before it is scaled (You et al., ICLR 2020, algorithm 2)."""
    return tl.fma(p, weight_decay, tl.div_rn(tl.div_rn(m, bias1), tl.div_rn(tl.sqrt_rn(v), root_bias2) + eps))


def lamb_moments(p, g, m, v, weight_decay, rate1, beta2, rate2, eps, bias1, root_bias2):
    """LAMB's first pass: the moments, and terms of the squared norms of the parameter and of the step."""
    m = lerp(m, g, rate1)
    v = mean_square(v, g, beta2, rate2)
    step = lamb_direction(p, g, m, v, weight_decay, rate1, beta2, rate2, eps, bias1, root_bias2)
    return m, v, p * p, step * step


def lamb(p, g, m, v, weight_decay, rate1, beta2, rate2, eps, bias1, root_bias2, step_size):
    """LAMB's second pass; the step is made anew from the moments, which costs less than storing it."""
    step = lamb_direction(p, g, m, v, weight_decay, rate1, beta2, rate2, eps, bias1, root_bias2)
    return tl.fma(step, -step_size, p)


def plain_lars(p, g, lr, weight_decay, trust):
    """LARS without momentum."""
    return tl.fma(decayed(p, g, weight_decay) * trust, -lr, p)


def lars(p, g, m, lr, momentum, undamped, weight_decay, nesterov, trust):
    """LARS (You et al., 2017): momentum over gradients that are scaled to each tensor's norm by `trust`."""
    g = decayed(p, g, weight_decay) * trust
    m = tl.fma(g, undamped, m * momentum)
    step = tl.where(nesterov > 0.5, tl.fma(m, momentum, g), m)
    return tl.fma(step, -lr, p), m


def muon_direction(p, g, m, direction, momentum, rate, nesterov):
    """Muon's momentum (Jordan, 2024), and the matrix that is to be orthogonalised."""
    m = lerp(m, g, rate)
    return m, tl.where(nesterov > 0.5, lerp(g, m, momentum), m)


def muon_step(p, direction, m, decay, lr):
    """Muon's step, once the direction is orthogonal."""
    return tl.fma(direction, -lr, p * decay)


PLAIN_SGD = ElementwiseRule("plain_sgd", plain_sgd, arrays=2, writes=(0,))
SGD = ElementwiseRule("sgd", sgd, arrays=3, writes=(0, 2))
ADAM = ElementwiseRule("adam", adam, arrays=4, writes=(0, 2, 3))
AMSGRAD = ElementwiseRule("amsgrad", amsgrad, arrays=5, writes=(0, 2, 3, 4))
NADAM = ElementwiseRule("nadam", nadam, arrays=4, writes=(0, 2, 3))
RADAM = ElementwiseRule("radam", radam, arrays=4, writes=(0, 2, 3))
ADAMAX = ElementwiseRule("adamax", adamax, arrays=4, writes=(0, 2, 3))
ADAGRAD = ElementwiseRule("adagrad", adagrad, arrays=3, writes=(0, 2))
ADADELTA = ElementwiseRule("adadelta", adadelta, arrays=4, writes=(0, 2, 3))
RMSPROP = ElementwiseRule("rmsprop", rmsprop, arrays=3, writes=(0, 2))
RMSPROP_MOMENTUM = ElementwiseRule("rmsprop_momentum", rmsprop_momentum, arrays=4, writes=(0, 2, 3))
RMSPROP_CENTERED = ElementwiseRule("rmsprop_centered", rmsprop_centered, arrays=4, writes=(0, 2, 3))
RMSPROP_CENTERED_MOMENTUM = ElementwiseRule(
    "rmsprop_centered_momentum", rmsprop_centered_momentum, arrays=5, writes=(0, 2, 3, 4)
)
RPROP = ElementwiseRule("rprop", rprop, arrays=4, writes=(0, 2, 3))
ASGD = ElementwiseRule("asgd", asgd, arrays=3, writes=(0, 2))
LION = ElementwiseRule("lion", lion, arrays=3, writes=(0, 2))
SQUARED_NORM = ElementwiseRule("squared_norm", squared_norm, arrays=1, writes=(), sums=1)
NORMS = ElementwiseRule("norms", norms, arrays=2, writes=(), sums=2)
LAMB_MOMENTS = ElementwiseRule("lamb_moments", lamb_moments, arrays=4, writes=(2, 3), sums=2)
LAMB = ElementwiseRule("lamb", lamb, arrays=4, writes=(0,))
PLAIN_LARS = ElementwiseRule("plain_lars", plain_lars, arrays=2, writes=(0,))
LARS = ElementwiseRule("lars", lars, arrays=3, writes=(0, 2))
MUON_DIRECTION = ElementwiseRule("muon_direction", muon_direction, arrays=4, writes=(2, 3))
MUON_STEP = ElementwiseRule("muon_step", muon_step, arrays=3, writes=(0,))
