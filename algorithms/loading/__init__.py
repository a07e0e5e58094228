"""The former path of `bagua_kernels.algorithms.data`, for one release."""

import sys

from bagua_kernels.algorithms.data import balanced_batches as balanced_batches
from bagua_kernels.algorithms.data import balanced_sampler as balanced_sampler
from bagua_kernels.algorithms.data import costs as costs
from bagua_kernels.algorithms.data import order as order
from bagua_kernels.algorithms.data import shared_epoch as shared_epoch
from bagua_kernels.caller_warnings import warn_moved

# A pickle of a sampler names the modules of its classes, so each of them needs its former name, too.
for _module in (balanced_batches, balanced_sampler, costs, order, shared_epoch):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module

warn_moved(__name__, "bagua_kernels.algorithms.data", "import samplers from bagua_kernels.data")
