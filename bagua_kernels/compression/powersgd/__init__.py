"""PowerSGD's arithmetic: a matrix is sent as two thin factors."""

from bagua_kernels.compression.powersgd.config import PowerSGD as PowerSGD
from bagua_kernels.compression.powersgd.low_rank import AlternatingLowRank as AlternatingLowRank
from bagua_kernels.compression.powersgd.low_rank import LowRank as LowRank

__all__ = ["AlternatingLowRank", "LowRank", "PowerSGD"]
