"""The former path of `bagua_kernels.algorithms.data`, for one release."""

import sys
import warnings

from bagua_kernels.algorithms.data import balanced_batches as balanced_batches
from bagua_kernels.algorithms.data import balanced_sampler as balanced_sampler
from bagua_kernels.algorithms.data import costs as costs
from bagua_kernels.algorithms.data import order as order
from bagua_kernels.algorithms.data import shared_epoch as shared_epoch

# A pickle of a sampler names the modules of its classes, so each of them needs its former name, too.
for _module in (balanced_batches, balanced_sampler, costs, order, shared_epoch):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module

warnings.warn(
    "bagua_kernels.algorithms.loading has moved to bagua_kernels.algorithms.data, and this path stays for one release: import "
    "samplers from bagua_kernels.data",
    DeprecationWarning,
    stacklevel=2,
)
