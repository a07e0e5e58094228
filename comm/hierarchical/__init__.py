"""Collectives in two tiers: inside nodes, and between them."""

from bagua_kernels.comm.hierarchical.all_reduce import HierarchicalAllReduce as HierarchicalAllReduce
from bagua_kernels.comm.hierarchical.nodes import Nodes as Nodes

__all__ = ["HierarchicalAllReduce", "Nodes"]
