"""Who is out there and how bytes get to them.

from bagua_kernels import comm

comm.init()                            # torchrun's environment, or a single process
comm.world().all_reduce(tensor).wait()
"""

if __name__ != "bagua_kernels.comm":
    raise ImportError(
        f"this package is imported as bagua_kernels.comm, not as {__name__}: remove its folder from sys.path"
    )

from bagua_kernels.comm.backends.local.communicator import LocalCommunicator as LocalCommunicator
from bagua_kernels.comm.backends.local.communicator import run_ranks as run_ranks
from bagua_kernels.comm.backends.nccl.communicator import NcclCommunicator as NcclCommunicator
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator as StripedCommunicator
from bagua_kernels.comm.backends.sockets.tuning import Tuning as Tuning
from bagua_kernels.comm.backends.torch_distributed.communicator import TorchCommunicator as TorchCommunicator
from bagua_kernels.comm.communicator import Communicator as Communicator
from bagua_kernels.comm.hierarchical.all_reduce import HierarchicalAllReduce as HierarchicalAllReduce
from bagua_kernels.comm.hierarchical.nodes import Nodes as Nodes
from bagua_kernels.comm.reduction import ReduceOp as ReduceOp
from bagua_kernels.comm.rendezvous import device as device
from bagua_kernels.comm.rendezvous import init as init
from bagua_kernels.comm.rendezvous import is_initialized as is_initialized
from bagua_kernels.comm.rendezvous import rank as rank
from bagua_kernels.comm.rendezvous import shutdown as shutdown
from bagua_kernels.comm.rendezvous import size as size
from bagua_kernels.comm.rendezvous import world as world
from bagua_kernels.comm.tuning.measure import tune as tune
from bagua_kernels.comm.work import Work as Work

__all__ = [
    "Communicator",
    "HierarchicalAllReduce",
    "LocalCommunicator",
    "NcclCommunicator",
    "Nodes",
    "ReduceOp",
    "StripedCommunicator",
    "TorchCommunicator",
    "Tuning",
    "Work",
    "device",
    "init",
    "is_initialized",
    "rank",
    "run_ranks",
    "shutdown",
    "size",
    "tune",
    "world",
]
