"""The former folder of `bagua_kernels.algorithms.models`, for one release."""
