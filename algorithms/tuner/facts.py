"""The former path of `bagua_kernels.algorithms.choosing.facts`, for one release."""

import warnings

from bagua_kernels.algorithms.choosing.facts import Facts as Facts

warnings.warn(
    "bagua_kernels.algorithms.tuner.facts has moved to bagua_kernels.algorithms.choosing.facts, and this path stays for one "
    "release: import from there",
    DeprecationWarning,
    stacklevel=2,
)
