"""Gossip of encoded differences, of one element: what a rank sends, and what becomes of its vectors.

`own` is the replica of a rank's parameter that its neighbours have, too. `total` is the weighted sum of the replicas of the rank
and its neighbours.
"""

from __future__ import annotations

from bagua_kernels.rules.messages import MessageRule
from bagua_kernels.rules.optimizers import ElementwiseRule


def scaled_difference(x, own, factor):
    """The difference from the replica, times a factor."""
    return (x - own) * factor


def moved(sent, x, own, factor):
    """The replica, moved by what neighbours decode."""
    return own + sent


def mixed_difference(x, own, total):
    """The mean of the replicas and the optimizer's step, less the replica."""
    return (total + x) - 2.0 * own


def replaced(sent, x, own, total):
    """The replica, moved by what neighbours decode: the new parameter."""
    return own + sent


def both_replaced(sent, x, own, total):
    """The parameter and its replica, which are equal after the message."""
    replica = own + sent
    return replica, replica


def added(total, change):
    """The sum of both."""
    return total + change


def unchanged(change):
    """The sum, which no array is to hold."""
    return change


def towards(x, gap, rate):
    """The parameter, moved by `rate` times the distance of the neighbours' replicas from its own."""
    return x + gap * rate


# Choco-SGD (Koloskova et al., ICML 2019), (x, own; factor): sends C(factor (x - own)), then own += what is decoded.
CHOCO = MessageRule("choco", scaled_difference, 2, after=moved, after_writes=(1,))
# DCD-PSGD (Tang et al., NeurIPS 2018), (x, own, total): sends C((total + x) - 2 own), then x = own + what is decoded.
DCD = MessageRule("dcd", mixed_difference, 3, after=replaced, after_writes=(0,))
# The same, and own = x: for a rank that keeps a running total instead of the replicas.
DCD_TOTAL = MessageRule("dcd_total", mixed_difference, 3, after=both_replaced, after_writes=(0, 1))
# (total, the sum of what is decoded): total += the sum.
ADDED = ElementwiseRule("added", added, arrays=2, writes=(0,))
# Nothing but replicas is updated.
NOTHING = ElementwiseRule("nothing", unchanged, arrays=1, writes=())
# (x, gap; rate): x += rate gap.
TOWARDS = ElementwiseRule("towards", towards, arrays=2, writes=(0,))
