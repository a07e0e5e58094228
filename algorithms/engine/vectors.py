"""The former path of `bagua_kernels.algorithms.exchanges.vectors`, for one release."""

from bagua_kernels.algorithms.exchanges.vectors import Named as Named
from bagua_kernels.algorithms.exchanges.vectors import euclidean_norm as euclidean_norm
from bagua_kernels.algorithms.exchanges.vectors import gather as gather
from bagua_kernels.algorithms.exchanges.vectors import mean_of as mean_of
from bagua_kernels.algorithms.exchanges.vectors import scatter as scatter
from bagua_kernels.caller_warnings import warn_moved

warn_moved(__name__, "bagua_kernels.algorithms.exchanges.vectors")
