"""PowerSGD's arithmetic: a matrix is sent as two thin factors."""

from bagua_kernels.compression.powersgd.config import AlternatingLowRank as AlternatingLowRank
from bagua_kernels.compression.powersgd.config import LowRank as LowRank
from bagua_kernels.compression.powersgd.config import PowerSGD as PowerSGD

__all__ = ["AlternatingLowRank", "LowRank", "PowerSGD"]
