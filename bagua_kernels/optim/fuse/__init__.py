"""Fusing optimizers that are not of this package: their step over many tensors becomes one over a few flat ones."""

from bagua_kernels.optim.fuse.elementwise_probe import NotElementwiseError as NotElementwiseError
from bagua_kernels.optim.fuse.optimizer import FusedStep as FusedStep
from bagua_kernels.optim.fuse.optimizer import fuse_optimizer as fuse_optimizer

__all__ = ["FusedStep", "NotElementwiseError", "fuse_optimizer"]
