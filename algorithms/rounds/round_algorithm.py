"""The former path of `bagua_kernels.algorithms.models.model_algorithm`, for one release."""

from bagua_kernels.algorithms.models.model_algorithm import RoundAlgorithm as RoundAlgorithm
from bagua_kernels.algorithms.models.model_algorithm import RoundOptions as RoundOptions
from bagua_kernels.caller_warnings import warn_moved

warn_moved(__name__, "bagua_kernels.algorithms.models.model_algorithm")
