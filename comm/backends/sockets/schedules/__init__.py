"""The steps of each collective, as the lanes of one rank: what it sends to whom, and what it does with what arrives.

With n ranks, b bytes per rank and a one-way delay of d, on links of B bytes per second:

name        delays           bytes a rank sends
exchange    1                (n-1) b
doubling    log2 n           b log2 n
direct      2                2 (n-1)/n b
halving     2 ceil(log2 n)   2 (n-1)/n b
ring        2 (n-1)          2 (n-1)/n b

`doubling` is recursive doubling. The source is Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005, section 4.4. There a number of ranks that is no power of two costs another two delays. `halving` is
for any number of ranks, see `rounds`. Results have the same bits on all ranks: every element is either reduced by one rank, or
by all in one order.
"""

from bagua_kernels.comm.backends.sockets.schedules.all_reduce import direct as direct
from bagua_kernels.comm.backends.sockets.schedules.all_reduce import doubling as doubling
from bagua_kernels.comm.backends.sockets.schedules.all_reduce import exchange as exchange
from bagua_kernels.comm.backends.sockets.schedules.all_reduce import ring as ring
from bagua_kernels.comm.backends.sockets.schedules.other import all_to_all as all_to_all
from bagua_kernels.comm.backends.sockets.schedules.other import chain as chain
from bagua_kernels.comm.backends.sockets.schedules.other import messages as messages
from bagua_kernels.comm.backends.sockets.schedules.other import reduce_scatter as reduce_scatter
from bagua_kernels.comm.backends.sockets.schedules.other import ring_all_gather as ring_all_gather
from bagua_kernels.comm.backends.sockets.schedules.other import ring_reduce_scatter as ring_reduce_scatter
from bagua_kernels.comm.backends.sockets.schedules.other import rooted_reduce as rooted_reduce
from bagua_kernels.comm.backends.sockets.schedules.other import star as star
from bagua_kernels.comm.backends.sockets.schedules.ranks import Ranks as Ranks
from bagua_kernels.comm.backends.sockets.schedules.ranks import chunks as chunks
from bagua_kernels.comm.backends.sockets.schedules.ranks import cut as cut
from bagua_kernels.comm.backends.sockets.schedules.rounds import barrier_in_rounds as barrier_in_rounds
from bagua_kernels.comm.backends.sockets.schedules.rounds import gather_in_rounds as gather_in_rounds
from bagua_kernels.comm.backends.sockets.schedules.rounds import halving as halving
from bagua_kernels.comm.backends.sockets.schedules.rounds import reduce_scatter_in_rounds as reduce_scatter_in_rounds
from bagua_kernels.comm.backends.sockets.schedules.rounds import scattered as scattered
from bagua_kernels.comm.backends.sockets.schedules.rounds import tree as tree
