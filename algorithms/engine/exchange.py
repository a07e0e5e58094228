"""The former path of `bagua_kernels.algorithms.exchanges.exchange`, for one release."""

import warnings

from bagua_kernels.algorithms.exchanges.exchange import Exchange as Exchange
from bagua_kernels.algorithms.exchanges.exchange import Updates as Updates

warnings.warn(
    "bagua_kernels.algorithms.engine.exchange has moved to bagua_kernels.algorithms.exchanges.exchange, and this path stays for "
    "one release: import from there",
    DeprecationWarning,
    stacklevel=2,
)
