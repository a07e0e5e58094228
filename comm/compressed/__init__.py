"""Compressed collectives over any codec; `docs/compressed-collectives.md` specifies the messages.

all_reduce = all_reduce_for(from_spec("minmax_uint8"), comm.world(), gradient.numel())
all_reduce(gradient, seed=step)        # the mean over all ranks, with the same bits on all of them
"""

from bagua_kernels.comm.compressed.all_reduce import CompressedAllReduce as CompressedAllReduce
from bagua_kernels.comm.compressed.choice import all_reduce_for as all_reduce_for
from bagua_kernels.comm.compressed.choice import measure_plain_below as measure_plain_below
from bagua_kernels.comm.compressed.contract import AllReduce as AllReduce
from bagua_kernels.comm.compressed.contract import Deliver as Deliver
from bagua_kernels.comm.compressed.contract import Source as Source
from bagua_kernels.comm.compressed.halves import CompressedAllGather as CompressedAllGather
from bagua_kernels.comm.compressed.halves import CompressedReduceScatter as CompressedReduceScatter
from bagua_kernels.comm.compressed.layout import FIRST_PASS as FIRST_PASS
from bagua_kernels.comm.compressed.layout import SECOND_PASS as SECOND_PASS
from bagua_kernels.comm.compressed.layout import Layout as Layout
from bagua_kernels.comm.compressed.linear import LinearAllReduce as LinearAllReduce
from bagua_kernels.comm.compressed.neighbours import NeighbourExchange as NeighbourExchange
from bagua_kernels.comm.compressed.sparse import SparseAllReduce as SparseAllReduce

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
