"""The outer step of local steps, of one element.

`start` is what all ranks have had in common since the last round. A pseudo-gradient is `start` less the parameter after the
local steps; optimizers subtract it as they do a gradient.
"""

from __future__ import annotations

from bagua_kernels.rules.optimizers import ElementwiseRule


def nesterov(start, momentum, mean, rate, decay):
    """The outer step and the momentum, in the form of `torch.optim.SGD`. With rate 1 and decay 0 it is start - mean."""
    momentum = decay * momentum + mean
    return start - rate * (mean + decay * momentum), momentum


def slow_momentum(start, momentum, mean, rate, decay):
    """The outer step and the momentum of SlowMo, both in units of parameters. With rate 1 and decay 0 it is start - mean."""
    momentum = decay * momentum + mean
    return start - rate * momentum, momentum


def rebased(x, start, sent):
    """The new start, and what the rank has learned since it sent."""
    return x + (start - sent)


def blended(x, start, share):
    """A share of the parameter, and the rest from the new start."""
    return share * x + (1.0 - share) * start


# (start, momentum, the mean of pseudo-gradients; rate, decay).
NESTEROV = ElementwiseRule("outer_nesterov", nesterov, arrays=3, writes=(0, 1))
SLOW_MOMENTUM = ElementwiseRule("slow_momentum", slow_momentum, arrays=3, writes=(0, 1))
# (x, start, x when it was sent).
REBASED = ElementwiseRule("rebased", rebased, arrays=3, writes=(0,))
# (x, start; share).
BLENDED = ElementwiseRule("blended", blended, arrays=2, writes=(0,))
