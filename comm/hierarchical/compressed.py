"""The compressed all-reduce in two tiers: floats inside nodes, payloads between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.compressed.base import AllReduce, Deliver, Source
from bagua_kernels.comm.compressed.residuals import Kept, Residuals
from bagua_kernels.comm.hierarchical.line import Line
from bagua_kernels.comm.hierarchical.residuals import ShardResiduals
from bagua_kernels.comm.hierarchical.tiered import TieredReduction
from bagua_kernels.comm.hierarchical.tiers import Tiers
from bagua_kernels.comm.reduction import ReduceOp
from bagua_kernels.comm.work import Steps, Together, drive
from bagua_kernels.compression import Codec


class TieredAllReduce(AllReduce):
    """Averages vectors of one size over all ranks, compressed between nodes only (BAGUA, VLDB 2022, section 3.3).

    With L ranks on this node, P in all and N nodes:

    1. Reduce-scatter in float32 inside the node: each rank has the sum of one shard, which it multiplies by N / P.
    2. The ranks of one place on all nodes take the mean of these by the codec's own all-reduce (`all_reduce_for`). It is the
       mean over all P ranks, whatever the numbers of ranks on nodes.
    3. All-gather inside the node. Where step 2 encodes the mean, its payloads are gathered, and all ranks decode them alike.

    On a node of fewer ranks than the largest a rank has several shards. Each node sends what `all_reduce_for` sends for N ranks.
    The exact part is averaged in the same two tiers as it is.

    Residuals are those of step 2, and kept by the rank that encodes, for its shards. With the ranks' residuals the sums of what
    goes in and of what comes out are equal: see `vectors`.
    """

    def __init__(
        self,
        codec: Codec,
        communicator: Communicator,
        tiers: Tiers,
        line: Line,
        n: int,
        exact: int = 0,
        dtype: torch.dtype = torch.float32,
        *,
        worker_residual: bool = False,
        owner_residual: bool = False,
        pieces: int | None = None,
        plain_below: int = 0,
        own: Sequence[slice] | None = None,
    ) -> None:
        """Prepares for vectors of a size; arguments as for `all_reduce_for`, and the tiers and the line of the communicator.

        Raises:
            TypeError: as for `all_reduce_for`.
            ValueError: as for `all_reduce_for`.
        """
        super().__init__(codec, communicator, n, exact, dtype, plain_below)
        self._tiers, self._line = tiers, line
        if self.plain:
            return
        self._reduction = TieredReduction(
            tiers,
            n,
            torch.float32,
            codec=codec,
            op=ReduceOp.AVG,
            pieces=1 if pieces is None else pieces,
            worker_residual=worker_residual,
            owner_residual=owner_residual,
            own=own,
        )
        self.delivers = self._reduction.shares_payloads
        # Ranks of less precision than float32 have another vector for sums.
        self._sums = None if dtype == torch.float32 else torch.zeros(n, device=communicator.device)

    def _exchange(
        self, x: torch.Tensor, exact: torch.Tensor, seed: int, source: Source | None, deliver: Deliver | None
    ) -> Steps:
        if before := self._line.under_way():
            # Their later steps use the same communicators, and may have ended on other ranks.
            yield Together(before)
        exact_mean = self.communicator.all_reduce(exact, ReduceOp.AVG)
        sums = x if self._sums is None else self._sums.copy_(x)
        yield from self._reduction.steps(sums, seed, deliver)
        if sums is not x and deliver is None:
            x.copy_(sums)
        yield exact_mean

    def residuals(self) -> dict[str, Kept | None]:
        """See `AllReduce.residuals`: those of this rank's shards."""
        if self.plain:
            return {}
        kept: dict[str, list[tuple[int, Residuals]]] = {}
        names: dict[str, None] = {}
        for start, each in self._exchanges():
            for name, residuals in each.residuals().items():
                names[name] = None
                if isinstance(residuals, Residuals):
                    kept.setdefault(name, []).append((start + each._start(name), residuals))
        return {name: ShardResiduals(kept[name]) if name in kept else None for name in names}

    @contextlib.contextmanager
    def withheld(self, spans: Sequence[tuple[int, int]]) -> Iterator[None]:
        """See `AllReduce.withheld`."""
        with contextlib.ExitStack() as stack:
            for residuals in self.residuals().values() if spans else ():
                if residuals is not None:
                    stack.enter_context(residuals.withheld(spans))
            yield

    def vectors(self) -> dict[str, torch.Tensor]:
        """See `AllReduce.vectors`: a worker's residual counts as much in the mean of all ranks' as it does between nodes."""
        found: dict[str, torch.Tensor] = {}
        times = self.communicator.size / len(self._tiers.nodes.members)
        for start, each in [] if self.plain else self._exchanges():
            for name, vector in each.vectors().items():
                whole = found.setdefault(name, torch.zeros(self.n, device=self.communicator.device))
                # An owner's residual is the same on all nodes, and then on all ranks.
                whole[start : start + each.n] = vector * times if name == "worker" else vector
        if "owner" in found:
            # Each element is that of one rank of the node, and zero on the others.
            self._tiers.local.all_reduce(found["owner"]).wait()
        return found

    def load_vectors(self, vectors: Mapping[str, torch.Tensor]) -> None:
        """See `AllReduce.load_vectors`: the residuals of a node's ranks are added up, as their vectors are."""
        if self.plain:
            return
        summed: dict[tuple[int, int], torch.Tensor] = {}

        def add_up(vector: torch.Tensor) -> Steps:
            summed.update((yield from self._reduction.reduce_within(vector)))

        # All ranks have a residual or none: it comes from the state of a common step.
        if "worker" in vectors:
            drive(add_up(vectors["worker"].to(torch.float32, copy=True)))
        for (piece, shard), each in self._reduction.exchanges.items():
            part = {name: vector[self._reduction.pieces[piece][shard]] for name, vector in vectors.items()}
            if (piece, shard) in summed:
                part["worker"] = summed[piece, shard]
            each.load_vectors(part)

    def _exchanges(self) -> list[tuple[int, AllReduce]]:
        """The exchanges between nodes, with the places of their first elements."""
        pieces = self._reduction.pieces
        return [(pieces[piece][shard].start, each) for (piece, shard), each in self._reduction.exchanges.items()]
