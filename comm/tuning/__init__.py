"""Which way of carrying out a collective is used for which size, measured in a job or by the launcher before it."""

from bagua_kernels.comm.backends.sockets.tuning import Cost, Tuning

__all__ = ["Cost", "Tuning"]
