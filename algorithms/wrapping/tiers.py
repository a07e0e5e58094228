"""One tier or two: where the ranks of a node average before they meet other nodes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from bagua_kernels.comm import Communicator, Nodes
from bagua_kernels.comm.hierarchical import TieredCommunicator
from bagua_kernels.comm.hierarchical.arguments import given

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TierOptions:
    """Which ranks average first.

    Attributes:
        hierarchical: True for two tiers; None for two where nodes have several ranks; False for one.
        nodes: which ranks share a node; None to find that.
        refusal: why an algorithm has one tier only; empty if it may have two.
        evenly: True if all nodes have to have as many ranks, for otherwise a mean of their means is not that of all ranks.
    """

    hierarchical: bool | None = None
    nodes: Nodes | Iterable[Iterable[int]] | None = None
    refusal: str = ""
    evenly: bool = False

    def __post_init__(self) -> None:
        if self.hierarchical not in (None, True, False):
            raise ValueError(f"hierarchical must be True, False or None, got {self.hierarchical!r}")
        if self.hierarchical and self.refusal:
            raise ValueError(f"{self.refusal}: leave out hierarchical")

    def nodes_of(self, communicator: Communicator) -> Nodes | None:
        """Returns the nodes if there is a use for two tiers, else None; collective.

        There is none on one node, nor where each node has one rank.

        Raises:
            ValueError: the given nodes are not those of the ranks; or they cannot be found or are uneven, and `hierarchical` is
                True.
        """
        if self.hierarchical is False or self.refusal or communicator.size == 1:
            return None
        if self.nodes is not None:
            found = given(self.nodes)
            if found.size != communicator.size:
                raise ValueError(
                    f"expected the nodes of {communicator.size} ranks, got those of {found.size}: {found.members}; name each "
                    "rank once"
                )
        else:
            try:
                found = Nodes.find(communicator)
            except ValueError as error:  # the same on all ranks
                if self.hierarchical:
                    raise
                if communicator.rank == 0:
                    logger.warning("ranks of a node do not average first: %s", error)
                return None
        if not 1 < len(found.members) < communicator.size:
            return None
        if self.evenly and not found.even:
            if self.hierarchical:
                raise ValueError(
                    "in two tiers this algorithm weighs nodes alike, and expects as many ranks on each node, got "
                    f"{[list(node) for node in found.members]}: leave out hierarchical"
                )
            return None
        return found

    def tiered(self, communicator: Communicator) -> Communicator:
        """Returns a communicator in two tiers that has taken over the given one, or the given one; collective."""
        nodes = self.nodes_of(communicator)
        return communicator if nodes is None else TieredCommunicator(communicator, nodes)


def even_nodes(communicator: Communicator) -> tuple[tuple[int, ...], ...] | None:
    """Returns the ranks of each node if the communicator has two tiers, and all nodes as many ranks; else None."""
    if not isinstance(communicator, TieredCommunicator) or not communicator.nodes.even:
        return None
    return communicator.nodes.members
