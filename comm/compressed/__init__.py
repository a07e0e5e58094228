"""Compressed collectives over any codec; `docs/compressed-collectives.md` specifies the messages.

all_reduce = all_reduce_for(from_spec("minmax_uint8"), comm.world(), gradient.numel())
all_reduce(gradient, seed=step)        # the mean over all ranks, with the same bits on all of them
"""

from bagua_kernels.comm.compressed.all_reduce import CompressedAllReduce
from bagua_kernels.comm.compressed.base import AllReduce, Deliver, Source
from bagua_kernels.comm.compressed.factory import all_reduce_for, measure_plain_below
from bagua_kernels.comm.compressed.layout import FIRST_PASS, SECOND_PASS, Layout
from bagua_kernels.comm.compressed.linear import LinearAllReduce
from bagua_kernels.comm.compressed.neighbours import NeighbourExchange
from bagua_kernels.comm.compressed.sharded import CompressedAllGather, CompressedReduceScatter
from bagua_kernels.comm.compressed.sparse import SparseAllReduce

__all__ = [
    "FIRST_PASS",
    "SECOND_PASS",
    "AllReduce",
    "CompressedAllGather",
    "CompressedAllReduce",
    "CompressedReduceScatter",
    "Deliver",
    "Layout",
    "LinearAllReduce",
    "NeighbourExchange",
    "Source",
    "SparseAllReduce",
    "all_reduce_for",
    "measure_plain_below",
]
