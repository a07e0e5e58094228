"""Exchanges for a `DistributedDataParallel` that stays as it is: `model.register_comm_hook(None, ddp.hook("bytegrad"))`."""

from bagua_kernels.algorithms.ddp.hook import Hook as Hook
from bagua_kernels.algorithms.ddp.hook import hook as hook

__all__ = ["Hook", "hook"]
