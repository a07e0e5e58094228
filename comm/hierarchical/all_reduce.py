"""All-reduce in two tiers: in full precision inside nodes, and between nodes as it is or compressed."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from types import TracebackType

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.compressed import AllReduce, all_reduce_for
from bagua_kernels.comm.compressed.base import check_seed
from bagua_kernels.comm.compressed.layout import length
from bagua_kernels.comm.compressed.residuals import Residuals, restore, save
from bagua_kernels.comm.hierarchical.arguments import check_arguments, given
from bagua_kernels.comm.hierarchical.nodes import Nodes, check_agreement
from bagua_kernels.comm.hierarchical.scales import Scales
from bagua_kernels.comm.reduction import ReduceOp
from bagua_kernels.comm.work import FINISHED, Steps, Together, Work, drive
from bagua_kernels.compression import Codec, fold_seed
from bagua_kernels.quotient import divide_

_PIECE = 4 << 20  # bytes of the vector, against which the start of a collective is short
_MOST_PIECES = 8
_ALIGNMENT = 16  # bytes, at whose multiples shards begin


class HierarchicalAllReduce:
    """Reduces vectors of one size over all ranks of all nodes (after BAGUA, VLDB 2022; here each rank is a leader).

    The vector is cut into S shards, S being the ranks of the largest node. On a node of L ranks, local rank s mod L owns
    shard s. Each rank and each network card thus sends a part, on small nodes too. Then:

    1. Inside each node, each shard is reduced, in full precision, onto its owner.
    2. The owners of a shard, one per node, all-reduce it, compressed if there is a codec.
    3. Inside each node, the owners hand their shards to all.

    A long vector goes in pieces, so that step 2 of one runs beside steps 1 and 3 of others. Each of N nodes sends
    2 (N - 1) / N of the vector (with a codec, of its payload) to others, spread over its ranks.

    A mean is that of all ranks, whatever the sizes of the nodes: sums are added and divided once. float16 and bfloat16 are
    divided first, as for `ReduceOp.AVG`. With one node it is an ordinary all-reduce and no codec is applied; with one
    rank a node there is only step 2. All ranks get the same bits.

    It has communicators of its own, so the caller's operations never mix with it. After an error they are aborted.

    Attributes:
        nodes: the ranks of each node.
        local: the communicator of this rank's node.
        owners: for each shard that this rank owns, the communicator of its owners; empty with one node.
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
        self._n, self._dtype, self._codec, self._op = n, dtype, codec, op
        self._inner_op = ReduceOp.SUM if op is ReduceOp.AVG else op
        self._members = self.nodes.members[self.nodes.node_of(communicator.rank)]
        self._scales = Scales.of(self.nodes, len(self._members), dtype, codec, op)
        align = math.lcm(_ALIGNMENT // dtype.itemsize, 1 if codec is None else codec.block)
        count = pieces or min(_MOST_PIECES, n * dtype.itemsize // _PIECE)
        self._pieces = self.nodes.cut(n, align, count)
        self._scatters = len(self._members) == self.nodes.largest > 1
        # A shard of each piece, of the length of the piece's first, which is the longest.
        widths = [(shards[0].stop - shards[0].start) * self._scatters for shards in self._pieces]
        zeros = partial(torch.zeros, dtype=dtype, device=communicator.device)
        self._own = [zeros(width) for width in widths]
        # Reduce-scatter needs equal shards. The last piece, where its end falls short, is scattered from a longer copy.
        short = sum(widths) * self.nodes.largest > n
        self._padded = zeros(widths[-1] * self.nodes.largest * short)
        # The same on all ranks, though shards differ in length and some hold none.
        longest = max(length(shard) for shards in self._pieces for shard in shards)
        self._plain = codec is None or len(self.nodes.members) == 1 or longest < max(1, plain_below)
        self._compressed: dict[tuple[int, int], AllReduce] = {}
        self._connect(communicator)
        if codec is None:
            return
        try:
            for piece in range(len(self._pieces)):
                for shard in self.owners:
                    # One for each piece, since each has residuals of its own.
                    self._compressed[piece, shard] = all_reduce_for(
                        codec,
                        self.owners[shard],
                        length(self._pieces[piece][shard]),
                        dtype=torch.float32 if self._scales.in_float32 else dtype,
                        worker_residual=worker_residual,
                        owner_residual=owner_residual,
                        plain_below=plain_below,
                    )
        except BaseException:
            self.abort()
            raise

    def _connect(self, communicator: Communicator) -> None:
        """Makes the communicators; all ranks in the same order."""
        self.owners: dict[int, Communicator] = {}
        self._all: list[Communicator] = []
        try:
            local = communicator.split(self._members)
            assert local is not None
            self.local = local
            self._all.append(local)
            for shard in range(self.nodes.largest if len(self.nodes.members) > 1 else 0):
                owners = communicator.split(self.nodes.owners(shard))
                if owners is not None:
                    self.owners[shard] = owners
                    self._all.append(owners)
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
        number = 0 if self._codec is None else check_seed(self._codec, seed, self._plain)
        try:
            if len(self.nodes.members) == 1:
                yield self.local.all_reduce(x, self._op)
            else:
                yield from self._run(x, number)
        except BaseException as error:
            # Whatever it is, and be it an interrupt: owners of other shards would wait for this rank until their timeout.
            self.abort()
            owners = [self.nodes.owners(shard) for shard in self.owners]
            error.add_note(f"ranks of this node: {list(self._members)}; owners of the shards of this rank: {owners}")
            raise

    def _run(self, x: torch.Tensor, seed: int) -> Steps:
        """Steps 1, 2 and 3 of each piece, on all ranks in one order, which is why none waits for ever for another."""
        if self._scales.before != 1:
            divide_(x, self._scales.before)
        # Compressed, step 2 has ended when it returns, and step 3 need not wait for the next piece's.
        lag = 1 if self._codec is None else 0
        count = len(self._pieces)
        reduced, across, shared = list[Work](), list[Work](), list[Work]()
        for step in range(count + 1 + lag):
            if step < count:
                reduced.append(self._reduce_within(x, step))
            if 0 <= step - 1 < count:
                yield reduced[step - 1]
                across.append((yield from self._reduce_across(x, step - 1, seed)))
            if 0 <= step - 1 - lag < count:
                yield across[step - 1 - lag]
                shared.append(self._share_within(x, step - 1 - lag))
        yield Together(shared)
        if self._padded.numel():
            end = x[_span(self._pieces[-1])]
            end.copy_(self._padded[: end.numel()])

    def _reduce_within(self, x: torch.Tensor, piece: int) -> Work:
        """Step 1."""
        if self._scatters:
            whole = self._whole(x, piece)
            if whole is self._padded:
                end = x[_span(self._pieces[piece])]
                whole[: end.numel()].copy_(end)
            return self.local.reduce_scatter(self._own[piece], whole, self._inner_op)
        size, shards = self.local.size, enumerate(self._pieces[piece])
        return Together([self.local.reduce(x[shard], s % size, self._inner_op) for s, shard in shards])

    def _reduce_across(self, x: torch.Tensor, piece: int, seed: int) -> Generator[Work, None, Work]:
        """Step 2."""
        if self._codec is None:
            return Together([self.owners[s].all_reduce(mine, self._inner_op) for s, mine in self._mine(x, piece)])
        for s, mine in self._mine(x, piece):
            yield from self._compress(piece, s, mine, fold_seed(seed, piece, s))
        return FINISHED

    def _share_within(self, x: torch.Tensor, piece: int) -> Work:
        """Step 3."""
        if self._scales.after != 1:
            for _, mine in self._mine(x, piece):
                divide_(mine, self._scales.after)
        if self._scatters:
            return self.local.all_gather(self._whole(x, piece), self._own[piece])
        size, shards = self.local.size, enumerate(self._pieces[piece])
        return Together([self.local.broadcast(x[shard], s % size) for s, shard in shards])

    def _whole(self, x: torch.Tensor, piece: int) -> torch.Tensor:
        """Returns all shards of a piece, of equal lengths."""
        last = piece == len(self._pieces) - 1
        return self._padded if last and self._padded.numel() else x[_span(self._pieces[piece])]

    def _compress(self, piece: int, shard: int, mine: torch.Tensor, seed: int) -> Steps:
        """Replaces a shard by the compressed, weighted mean over its owners, or by their sum."""
        work = mine.float() if self._scales.in_float32 else mine
        if self._scales.weight != 1:
            work.mul_(self._scales.weight)
        yield from self._compressed[piece, shard].steps(work, seed=seed)
        if self._scales.times != 1:
            work.mul_(self._scales.times)
        if work is not mine:
            mine.copy_(work)

    def _mine(self, x: torch.Tensor, piece: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields number and elements of each shard that this rank owns, those that hold none left out."""
        for s in self.owners:
            shard = self._pieces[piece][s]
            if elements := length(shard):
                yield s, self._own[piece][:elements] if self._scatters else x[shard]

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

    def _residuals(self) -> dict[str, Residuals | None]:
        return {
            f"{piece}.{shard}.{name}": residuals
            for (piece, shard), all_reduce in self._compressed.items()
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
        return sum(communicator.bytes_sent for communicator in self.owners.values())

    def close(self) -> None:
        """Frees the connections; every rank calls it, as often as it likes."""
        for communicator in self._all:
            communicator.close()

    def abort(self) -> None:
        """Gives up: every later call raises `CommunicationError` here, and others see this rank left."""
        for communicator in self._all:
            communicator.abort()

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


def _span(shards: Sequence[slice]) -> slice:
    return slice(shards[0].start, shards[-1].stop)
