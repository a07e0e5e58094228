"""Who talks to whom in gossip: mixing matrices, and one step of averaging with them; see `docs/topologies.md`."""

from bagua_kernels.comm.topology.average import neighbour_average as neighbour_average
from bagua_kernels.comm.topology.base import TOLERANCE as TOLERANCE
from bagua_kernels.comm.topology.base import Matrix as Matrix
from bagua_kernels.comm.topology.base import Needs as Needs
from bagua_kernels.comm.topology.base import Topology as Topology
from bagua_kernels.comm.topology.changing import OnePeerExponential as OnePeerExponential
from bagua_kernels.comm.topology.changing import RandomMatching as RandomMatching
from bagua_kernels.comm.topology.changing import ShiftOne as ShiftOne
from bagua_kernels.comm.topology.fixed import Complete as Complete
from bagua_kernels.comm.topology.fixed import GivenMatrix as GivenMatrix
from bagua_kernels.comm.topology.fixed import Graph as Graph
from bagua_kernels.comm.topology.fixed import Ring as Ring
from bagua_kernels.comm.topology.fixed import StaticExponential as StaticExponential
from bagua_kernels.comm.topology.fixed import Torus as Torus

__all__ = [
    "TOLERANCE",
    "Complete",
    "GivenMatrix",
    "Graph",
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
]
