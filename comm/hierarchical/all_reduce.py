"""All-reduce in two tiers: in full precision inside nodes, and between nodes as it is or compressed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from types import TracebackType

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.compressed.base import check_seed
from bagua_kernels.comm.compressed.residuals import Kept, restore, save
from bagua_kernels.comm.hierarchical.arguments import check_arguments, given
from bagua_kernels.comm.hierarchical.nodes import Nodes, check_agreement
from bagua_kernels.comm.hierarchical.tiered import TieredReduction
from bagua_kernels.comm.hierarchical.tiers import Tiers
from bagua_kernels.comm.reduction import ReduceOp
from bagua_kernels.comm.work import Steps, drive
from bagua_kernels.compression import Codec


class HierarchicalAllReduce:
    """Reduces vectors of one size over all ranks of all nodes (after BAGUA, VLDB 2022; here each rank is a leader).

    The vector is cut into S shards, S being the ranks of the largest node. On a node of L ranks, local rank s mod L owns
    shard s. Each rank and each network card thus sends a part, on small nodes too. Then:

    1. Inside each node, each shard is reduced, in full precision, onto its owner.
    2. The owners of a shard, one per node, all-reduce it, compressed if there is a codec.
    3. Inside each node, the owners send their shards to all. Payloads of an encoded mean travel as they are; all decode them.

    A long vector goes in pieces, so that step 2 of one runs beside steps 1 and 3 of others. Each of N nodes sends
    2 (N - 1) / N of the vector (with a codec, of its payload) to others, spread over its ranks.

    A mean is that of all ranks, whatever the sizes of the nodes: sums are added and divided once. float16 and bfloat16 are
    divided first, as for `ReduceOp.AVG`. With one node it is an ordinary all-reduce and no codec is applied; with one
    rank a node there is only step 2. All ranks get the same bits.

    It has communicators of its own, so the caller's operations never mix with it. After an error they are aborted.

    Attributes:
        nodes: the ranks of each node.
        tiers: the communicators.
    """

    def __init__(
        self,
        communicator: Communicator,
        n: int,
        dtype: torch.dtype,
        *,
        nodes: Nodes | Iterable[Iterable[int]] | None = None,
        codec: Codec | None = None,
        op: ReduceOp = ReduceOp.SUM,
        pieces: int | None = None,
        plain_below: int = 0,
        worker_residual: bool = False,
        owner_residual: bool = False,
    ) -> None:
        """Connects the ranks; every rank calls it, with equal arguments.

        Args:
            communicator: the ranks that take part; must stay open for as long as this is used.
            n: elements of the vectors.
            dtype: of the vectors.
            nodes: which ranks share a node, lists of ranks as for `Nodes.given`; by default found by `Nodes.find`.
            codec: how shards are encoded between nodes; shards are cut at multiples of its block.
            op: the reduction; SUM or AVG where there is a codec.
            pieces: in how many a vector goes; by default one for each 4 MiB, at most 8.
            plain_below: elements below which a piece's shard is not encoded.
            worker_residual: True if owners keep what their payloads lack, piece by piece; for biased codecs.
            owner_residual: True if what the encoding of the mean loses is kept too; as for `all_reduce_for`.

        Raises:
            TypeError: if `op` cannot be applied to `dtype`, or a codec cannot; if `codec` or `nodes` is something else.
            ValueError: if an argument makes no sense, or if ranks pass different ones: it names them, on every rank.
            CommunicationError: a rank was lost or did not take part in time.
        """
        self.nodes = Nodes.find(communicator) if nodes is None else given(nodes).agree(communicator)
        # Compared before they are checked: a wrong argument of one rank must not leave the others waiting for it.
        kind = repr(codec) if is_dataclass(codec) else type(codec).__qualname__
        residuals = f"{worker_residual=}, {owner_residual=}"
        text = f"{n=}, {dtype=}, codec={kind}, {op=}, {pieces=}, {plain_below=}, {residuals}"
        check_agreement(communicator, "arguments", text)
        check_arguments(n, dtype, codec, op, pieces, plain_below)
        self._n, self._dtype, self._codec = n, dtype, codec
        self.tiers = Tiers(communicator, self.nodes)
        try:
            self._reduction = TieredReduction(
                self.tiers,
                n,
                dtype,
                codec=codec,
                op=op,
                pieces=pieces,
                plain_below=plain_below,
                worker_residual=worker_residual,
                owner_residual=owner_residual,
            )
        except BaseException:
            self.abort()
            raise

    def __call__(self, x: torch.Tensor, *, seed: int | None = None) -> None:
        """Replaces `x` by the reduction over all ranks; on a GPU the current stream waits, on a CPU the caller.

        Args:
            x: shape (n,), contiguous, of the dtype given before, on the communicator's device.
            seed: identifies this message, equal on all ranks: `fold_seed(seed, step, bucket)`. May be left out
                without a codec that draws random numbers.

        Raises:
            TypeError, ValueError: if `x` is not as described, or a seed is lacking.
            CommunicationError: a rank was lost or did not take part in time. Its rank numbers are those in the
                communicator that failed; a note lists the ranks.
        """
        drive(self.steps(x, seed=seed))

    def steps(self, x: torch.Tensor, *, seed: int | None = None) -> Steps:
        """Does what a call does, but yields each communication instead of waiting for it; see `AllReduce.steps`.

        The communicators are aborted if the generator is closed before its end, or if an error is thrown into it.

        Args:
            x: as for a call.
            seed: as for a call.

        Yields:
            The communications, each to be waited for before the generator is resumed.

        Raises:
            TypeError: as for a call.
            ValueError: as for a call.
            CommunicationError: as for a call.
        """
        x = self._checked(x)
        number = 0 if self._codec is None else check_seed(self._codec, seed, self._reduction.plain)
        yield from self._reduction.steps(x, number)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The residuals of step 2, named "piece.shard.name" with the names of `AllReduce.state_dict`; each rank's own."""
        return save(self._residuals())

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes what `state_dict` gave on this rank; what is lacking starts at zero again, and what has no place is dropped.

        Raises:
            ValueError: a residual has another number of elements; none is then loaded. Sizes and names belong to the
                vector's size, the number of pieces and the nodes.
        """
        restore(self._residuals(), state)

    def _residuals(self) -> dict[str, Kept | None]:
        return {
            f"{piece}.{shard}.{name}": residuals
            for (piece, shard), all_reduce in self._reduction.exchanges.items()
            for name, residuals in all_reduce.residuals().items()
        }

    def _checked(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch.Tensor) or x.dtype is not self._dtype:
            raise TypeError(f"expected a tensor of {self._dtype}, got {getattr(x, 'dtype', type(x).__name__)}")
        if x.shape != (self._n,) or not x.is_contiguous():
            raise ValueError(
                f"expected a contiguous tensor of shape ({self._n},), got shape {tuple(x.shape)} with strides "
                f"{x.stride()}: make another {type(self).__name__} for each size, and flatten tensors"
            )
        return x.detach()

    @property
    def bytes_across(self) -> int:
        """Payload bytes that this rank has sent to other nodes."""
        return self.tiers.bytes_across

    def close(self) -> None:
        """Frees the connections; every rank calls it, as often as it likes."""
        self.tiers.close()

    def abort(self) -> None:
        """Gives up: every later call raises `CommunicationError` here, and others see this rank left."""
        self.tiers.abort()

    def __enter__(self) -> HierarchicalAllReduce:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes, or aborts if the block raised."""
        if error is None:
            self.close()
        else:
            self.abort()
