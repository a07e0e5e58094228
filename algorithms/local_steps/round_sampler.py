"""The former path of `bagua_kernels.algorithms.data.round_sampler`, for one release."""

import warnings

from bagua_kernels.algorithms.data.round_sampler import RoundSampler as RoundSampler

warnings.warn(
    "bagua_kernels.algorithms.local_steps.round_sampler has moved to bagua_kernels.algorithms.data.round_sampler, and this "
    "path stays for one release: import RoundSampler from bagua_kernels.data",
    DeprecationWarning,
    stacklevel=2,
)
