"""The former path of `bagua_kernels.algorithms.models.model_algorithm`, for one release."""

import warnings

from bagua_kernels.algorithms.models.model_algorithm import RoundAlgorithm as RoundAlgorithm
from bagua_kernels.algorithms.models.model_algorithm import RoundOptions as RoundOptions

warnings.warn(
    "bagua_kernels.algorithms.rounds.round_algorithm has moved to bagua_kernels.algorithms.models.model_algorithm, and this path "
    "stays for one release: import from there",
    DeprecationWarning,
    stacklevel=2,
)
