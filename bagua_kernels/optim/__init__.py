"""Optimizers in one pass over memory: drop-in replacements for `torch.optim`, more of them, and ways to fuse any other.

>>> from bagua_kernels.optim import AdamW
>>> optimizer = AdamW(model.parameters(), lr=1e-3)
"""

import torch

from bagua_kernels.optim.adadelta import Adadelta
from bagua_kernels.optim.adagrad import Adagrad
from bagua_kernels.optim.adam import Adam, AdamW
from bagua_kernels.optim.adamax import Adamax
from bagua_kernels.optim.asgd import ASGD
from bagua_kernels.optim.chained import ChainedOptimizer
from bagua_kernels.optim.fuse.optimizer import NotElementwiseError, fuse_optimizer
from bagua_kernels.optim.lamb import LAMB
from bagua_kernels.optim.lars import LARS
from bagua_kernels.optim.lion import Lion
from bagua_kernels.optim.nadam import NAdam
from bagua_kernels.optim.radam import RAdam
from bagua_kernels.optim.rmsprop import RMSprop
from bagua_kernels.optim.rprop import Rprop
from bagua_kernels.optim.rule_optimizer import rule_optimizer
from bagua_kernels.optim.sgd import SGD
from bagua_kernels.optim.step.extras import Extras

__all__ = [
    "ASGD",
    "LAMB",
    "LARS",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ChainedOptimizer",
    "Extras",
    "Lion",
    "NAdam",
    "NotElementwiseError",
    "RAdam",
    "RMSprop",
    "Rprop",
    "fuse_optimizer",
    "rule_optimizer",
]

if hasattr(torch.optim, "Muon"):  # PyTorch 2.9
    from bagua_kernels.optim.muon import Muon
    from bagua_kernels.optim.muon_with_adamw import muon_with_adamw

    __all__ += ["Muon", "muon_with_adamw"]
