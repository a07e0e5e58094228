"""The former path of `bagua_kernels.algorithms.exchanges.vectors`, for one release."""

import warnings

from bagua_kernels.algorithms.exchanges.vectors import Named as Named
from bagua_kernels.algorithms.exchanges.vectors import euclidean_norm as euclidean_norm
from bagua_kernels.algorithms.exchanges.vectors import gather as gather
from bagua_kernels.algorithms.exchanges.vectors import mean_of as mean_of
from bagua_kernels.algorithms.exchanges.vectors import scatter as scatter

warnings.warn(
    "bagua_kernels.algorithms.engine.vectors has moved to bagua_kernels.algorithms.exchanges.vectors, and this path stays for "
    "one release: import from there",
    DeprecationWarning,
    stacklevel=2,
)
