"""The former folder of `bagua_kernels.algorithms.choosing`, for one release."""
