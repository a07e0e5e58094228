"""A communicator whose sums and copies cross each link between nodes once."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.compressed.base import AllReduce
from bagua_kernels.comm.hierarchical.compressed import TieredAllReduce
from bagua_kernels.comm.hierarchical.line import Line
from bagua_kernels.comm.hierarchical.nodes import Nodes
from bagua_kernels.comm.hierarchical.tiered import TieredReduction
from bagua_kernels.comm.hierarchical.tiers import Tiers
from bagua_kernels.comm.joining.seal import Seal
from bagua_kernels.comm.reduction import ReduceOp
from bagua_kernels.comm.work import Steps, Work
from bagua_kernels.compression import Codec

_UNIT = 16  # bytes, of which each part of a payload has a multiple


class TieredCommunicator(Communicator):
    """Another communicator, which exchanges in two tiers what all ranks get.

    - `all_reduce` reduces inside nodes, then between the owners of shards, and shares inside (`HierarchicalAllReduce`).
    - `all_reduce_for`, so each compressed all-reduce, does the same with payloads between nodes.
    - `broadcast` sends to one rank of each node, which sends to the others.
    - `all_gather` sends an input to one rank of each node, if all nodes have as many ranks.

    All other operations are those of the other communicator.

    Attributes:
        nodes: the ranks of each node.
    """

    def __init__(self, flat: Communicator, nodes: Nodes) -> None:
        """Connects ranks; every rank calls it, with the same nodes, and gives the communicator away.

        Args:
            flat: of all ranks; closed with this one.
            nodes: of its ranks.

        Raises:
            ValueError: the nodes are not those of so many ranks.
            CommunicationError: a rank was lost or did not take part in time.
        """
        if nodes.size != flat.size:
            raise ValueError(f"expected nodes of {flat.size} ranks, got {nodes.members}: name each rank once")
        self._flat, self.nodes = flat, nodes
        self.rank, self.size, self.device, self.blocks = flat.rank, flat.size, flat.device, flat.blocks
        self._tiers = Tiers(flat, nodes)
        self._line = Line(self.device)
        self._places = {rank: place for node in nodes.members for place, rank in enumerate(node)}

    @property
    def flat(self) -> Communicator:
        """See `Communicator`."""
        return self._flat

    @property
    def timeout(self) -> float:  # type: ignore[override]
        """See `Communicator`."""
        return self.flat.timeout

    @property
    def call(self) -> str:
        """See `Communicator`."""
        return self.flat.call

    @call.setter
    def call(self, call: str) -> None:
        for each in (self.flat, *self._tiers):
            each.call = call

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        """See `Communicator`: to all ranks, also those of this node."""
        return self.flat.bytes_sent + self._tiers.bytes_sent

    def all_reduce_for(self, codec: Codec, n: int, exact: int, dtype: torch.dtype, **options: Any) -> AllReduce:
        """See `comm.compressed.all_reduce_for`."""
        return TieredAllReduce(codec, self, self._tiers, self._line, n, exact, dtype, **options)

    def all_reduce_inside(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.AVG) -> Work:
        """Replaces a tensor by its reduction over the ranks of this node."""
        return self._tiers.local.all_reduce(tensor, op)

    def all_gather_of_nodes(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """Gathers one input of each node, whose ranks all have the same; only where nodes are even.

        Each rank sends a part of it to the ranks of its place on other nodes.

        Args:
            output: shape (nodes, n), uint8.
            input: shape (n,), uint8, with the same bytes on all ranks of a node.
        """
        output, input = self._enter("all_gather", "output", output), self._enter("all_gather", "input", input)
        return self._line.start(self._gather_of_nodes(output, input))

    def _gather_of_nodes(self, output: torch.Tensor, input: torch.Tensor) -> Steps:
        tiers, count = self._tiers, len(self.nodes.members)
        width = -(-input.numel() // (_UNIT * len(tiers.members))) * _UNIT
        place = self._places[self.rank]
        part = input.new_zeros(width)
        mine = input[place * width : (place + 1) * width]
        part[: mine.numel()].copy_(mine)
        across = input.new_empty(count, width)
        yield tiers.owners[place].all_gather(across, part)
        inside = input.new_empty(len(tiers.members), count, width)
        yield tiers.shared.all_gather(inside, across)
        output.copy_(inside.transpose(0, 1).reshape(count, -1)[:, : input.numel()])

    def set_timeout(self, seconds: float) -> None:
        """See `Communicator.set_timeout`."""
        self.flat.set_timeout(seconds)
        self._tiers.set_timeout(seconds)

    def abort(self, reason: str = "it was aborted") -> None:
        """See `Communicator.abort`."""
        self.flat.abort(reason)
        self._tiers.abort(reason)

    def drain(self) -> None:
        """See `Communicator.drain`."""
        for each in (self.flat, *self._tiers):
            each.drain()

    def close(self, limit: float | None = None) -> None:
        """See `Communicator.close`."""
        with contextlib.ExitStack() as closing:
            closing.callback(self.flat.close, limit)
            self._tiers.close(limit)

    def close_relatives(self) -> None:
        """See `Communicator.close_relatives`."""
        self.flat.close_relatives()

    def _sealed(self) -> Seal:
        return self.flat._sealed()

    def _unusable(self) -> str:
        return next((reason for each in (self.flat, *self._tiers) if (reason := each._unusable())), "")

    def _split(self, ranks: tuple[int, ...]) -> Communicator:
        made = self.flat._split(ranks)
        return TieredCommunicator(made, self.nodes) if len(ranks) == self.size else made

    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        vector = tensor.view(-1)
        reduction = TieredReduction(self._tiers, vector.numel(), vector.dtype, op=op, at_once=True)
        return self._line.start(reduction.steps(vector, 0))

    def _broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        return self._line.start(self._tiered_broadcast(tensor, src))

    def _tiered_broadcast(self, tensor: torch.Tensor, src: int) -> Steps:
        """To the ranks of all nodes that own the source's shard, and from these to the others."""
        tiers, nodes = self._tiers, self.nodes
        shard = self._places[src]
        if shard in tiers.owners:
            yield tiers.owners[shard].broadcast(tensor, nodes.node_of(src))
        owner = nodes.owners(shard)[nodes.node_of(self.rank)]
        yield tiers.shared.broadcast(tensor, tiers.members.index(owner))

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        if not self.nodes.even or len(self.nodes.members) == 1:
            return self.flat._all_gather(output, input)
        return self._line.start(self._tiered_all_gather(output, input))

    def _tiered_all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Steps:
        """From the ranks of the same place on all nodes, and then from those of this node."""
        tiers, members = self._tiers, self.nodes.members
        across = input.new_empty(len(members), input.numel())
        yield tiers.owners[self._places[self.rank]].all_gather(across, input)
        inside = input.new_empty(len(tiers.members), *across.shape)
        yield tiers.shared.all_gather(inside, across)
        rows = output.view(self.size, -1)
        for node, ranks in enumerate(members):
            for place, rank in enumerate(ranks):
                rows[rank].copy_(inside[place, node])

    def _reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp) -> Work:
        return self.flat._reduce(tensor, dst, op)

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp) -> Work:
        return self.flat._reduce_scatter(output, input, op)

    def _all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Work:
        return self.flat._all_to_all(output, input, output_splits, input_splits)

    def _gather(self, output: torch.Tensor | None, input: torch.Tensor, dst: int) -> Work:
        return self.flat._gather(output, input, dst)

    def _scatter(self, output: torch.Tensor, input: torch.Tensor | None, src: int) -> Work:
        return self.flat._scatter(output, input, src)

    def _send(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        return self.flat._send(tensor, dst, tag)

    def _recv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        return self.flat._recv(tensor, src, tag)

    def _neighbour_exchange(self, outputs: dict[int, torch.Tensor], inputs: dict[int, torch.Tensor], tag: int) -> Work:
        return self.flat._neighbour_exchange(outputs, inputs, tag)

    def _barrier(self) -> Work:
        return self.flat._barrier()
