"""Two processes that share one GPU as two ranks.

NCCL refuses two ranks on one GPU of a host. It compares names of hosts, so that each rank claims a host of its own.
"""

from __future__ import annotations

import os

from bagua_kernels import comm
from bagua_kernels.comm import Communicator
from bagua_kernels.comm.testing import free_port
from bench.gpu.stage import Context

SIZE = 2


def environments(nccl: str = "torch") -> list[dict[str, str]]:
    """The variables of each rank.

    Args:
        nccl: what drives NCCL, "torch" or "cupy".
    """
    port = str(free_port())
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(SIZE),
            "LOCAL_WORLD_SIZE": str(SIZE),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "NCCL_HOSTID": f"host-of-rank-{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "BAGUA_KERNELS_NCCL": nccl,
        }
        for rank in range(SIZE)
    ]


def joined(context: Context, timeout: float = 30.0) -> Communicator:
    """Joins the other rank, on the GPU that both share or on the CPU."""
    return comm.init(timeout=timeout, device="cuda:0" if context.on_gpu else "cpu")


def rank() -> int:
    """The rank of this process."""
    return int(os.environ["RANK"])
