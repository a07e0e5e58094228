"""Collectives in two tiers: inside nodes, and between them."""

from bagua_kernels.comm.hierarchical.all_reduce import HierarchicalAllReduce
from bagua_kernels.comm.hierarchical.communicator import TieredCommunicator
from bagua_kernels.comm.hierarchical.nodes import Nodes

__all__ = ["HierarchicalAllReduce", "Nodes", "TieredCommunicator"]
