"""Who is out there and how bytes get to them.

from bagua_kernels import comm

comm.init()                            # torchrun's environment, or a single process
comm.world().all_reduce(tensor).wait()
"""

if __name__ != "bagua_kernels.comm":
    raise ImportError(
        f"this package is imported as bagua_kernels.comm, not as {__name__}: remove its folder from sys.path"
    )

from bagua_kernels.comm.backends.local.communicator import LocalCommunicator
from bagua_kernels.comm.backends.local.run import run_ranks
from bagua_kernels.comm.backends.local.schedule import Schedule
from bagua_kernels.comm.backends.mailboxes import open_mailbox
from bagua_kernels.comm.backends.nccl.communicator import NcclCommunicator
from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.backends.sockets.tuning import Tuning
from bagua_kernels.comm.backends.torch_distributed.communicator import TorchCommunicator
from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.hierarchical.all_reduce import HierarchicalAllReduce
from bagua_kernels.comm.hierarchical.nodes import Nodes
from bagua_kernels.comm.mailbox import Mailbox
from bagua_kernels.comm.membership.agreement import Quota
from bagua_kernels.comm.membership.membership import Membership
from bagua_kernels.comm.reduction import ReduceOp
from bagua_kernels.comm.rendezvous import device, init, is_initialized, rank, shutdown, size, world
from bagua_kernels.comm.tuning.measure import tune
from bagua_kernels.comm.work import Work

__all__ = [
    "Communicator",
    "HierarchicalAllReduce",
    "LocalCommunicator",
    "Mailbox",
    "Membership",
    "NcclCommunicator",
    "Nodes",
    "Quota",
    "ReduceOp",
    "Schedule",
    "StripedCommunicator",
    "TorchCommunicator",
    "Tuning",
    "Work",
    "device",
    "init",
    "is_initialized",
    "open_mailbox",
    "rank",
    "run_ranks",
    "shutdown",
    "size",
    "tune",
    "world",
]
