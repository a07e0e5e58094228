"""Who talks to whom in gossip: mixing matrices, and one step of averaging with them; see `docs/topologies.md`."""

from bagua_kernels.comm.topology.average import neighbour_average, weighted_sum, whole
from bagua_kernels.comm.topology.base import TOLERANCE, Matrix, Needs, Topology
from bagua_kernels.comm.topology.changing import OnePeerExponential, RandomMatching, ShiftOne
from bagua_kernels.comm.topology.fixed import Complete, GivenMatrix, Graph, Lazy, Ring, StaticExponential, Torus

__all__ = [
    "TOLERANCE",
    "Complete",
    "GivenMatrix",
    "Graph",
    "Lazy",
    "Matrix",
    "Needs",
    "OnePeerExponential",
    "RandomMatching",
    "Ring",
    "ShiftOne",
    "StaticExponential",
    "Topology",
    "Torus",
    "neighbour_average",
    "weighted_sum",
    "whole",
]
