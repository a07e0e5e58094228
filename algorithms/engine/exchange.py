"""The former path of `bagua_kernels.algorithms.exchanges.exchange`, for one release."""

from bagua_kernels.algorithms.exchanges.exchange import Exchange as Exchange
from bagua_kernels.algorithms.exchanges.exchange import Updates as Updates
from bagua_kernels.caller_warnings import warn_moved

warn_moved(__name__, "bagua_kernels.algorithms.exchanges.exchange")
