"""The former path of `bagua_kernels.algorithms.data.round_sampler`, for one release."""

from bagua_kernels.algorithms.data.round_sampler import RoundSampler as RoundSampler
from bagua_kernels.caller_warnings import warn_moved

warn_moved(__name__, "bagua_kernels.algorithms.data.round_sampler", "import RoundSampler from bagua_kernels.data")
