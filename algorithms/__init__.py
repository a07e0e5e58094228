"""Training algorithms: one class each, used like `DistributedDataParallel`."""

if __name__ != "bagua_kernels.algorithms":
    raise ImportError(f"import this package as bagua_kernels.algorithms, not as {__name__}")

from bagua_kernels.algorithms.algorithm import Algorithm as Algorithm
from bagua_kernels.algorithms.algorithm import Stats as Stats
from bagua_kernels.algorithms.algorithm import from_spec as from_spec
from bagua_kernels.algorithms.algorithm import names as names
from bagua_kernels.algorithms.algorithm import register as register
from bagua_kernels.algorithms.allreduce import GradientAllReduce as GradientAllReduce
from bagua_kernels.algorithms.bytegrad import ByteGrad as ByteGrad

__all__ = ["Algorithm", "ByteGrad", "GradientAllReduce", "Stats", "from_spec", "names", "register"]
