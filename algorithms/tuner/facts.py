"""The former path of `bagua_kernels.algorithms.choosing.facts`, for one release."""

from bagua_kernels.algorithms.choosing.facts import Facts as Facts
from bagua_kernels.caller_warnings import warn_moved

warn_moved(__name__, "bagua_kernels.algorithms.choosing.facts")
