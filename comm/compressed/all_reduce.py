"""Compressed all-reduce in two passes: payloads instead of floats on the wire, for any codec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.compressed.base import AllReduce, Deliver, Source
from bagua_kernels.comm.compressed.counts import Counts
from bagua_kernels.comm.compressed.exact import ExactPart
from bagua_kernels.comm.compressed.layout import Layout, pipeline
from bagua_kernels.comm.compressed.memory import lent
from bagua_kernels.comm.compressed.phases import Gather, Scatter, encodes_pieces
from bagua_kernels.comm.compressed.residuals import Kept
from bagua_kernels.comm.work import Steps
from bagua_kernels.compression import Codec


class CompressedAllReduce(AllReduce):
    """Averages vectors of one size over all ranks, compressed in both directions (BAGUA, VLDB 2022, section 3.1, C_LP_S).

    1. The vector is cut into one chunk a rank, its owner, and each chunk is encoded.
    2. All-to-all: rank r receives everyone's payload of chunk r, and of the exact part chunk r, as it is.
    3. Rank r decodes them, takes the mean and encodes it again, in one pass over memory (`Codec.reduce`).
    4. All-gather: everyone receives all encoded means, and those of the exact part as they are.
    5. Everyone decodes the same bytes, so the result is the same on all ranks, bit for bit.

    Chunks go through these steps in pieces: while piece k is on its way to the owners, piece k + 1 is encoded, then k - 1
    reduced, then k - 2 decoded (`pipeline`). A rank sends about two payloads of the whole vector, and the exact part twice,
    whatever the number of ranks.

    Messages take memory while a vector is under way: all all-reduces of a communicator share it. For a payload of b bytes they
    take about 3 b with one piece and 6 b / k with k pieces. With the 8 pieces of a long vector this is 0.75 b. A float32 vector
    of n elements with one byte each takes 3 n and 0.75 n bytes. With the owners' residual the mean of a piece takes 4 n / (k P)
    more. What lasts are residuals alone: 4 n bytes of the worker, and 4 n / P of each of P owners.

    With residuals both encodings do error feedback (DoubleSqueeze, Tang et al., ICML 2019, algorithm 1): step 1 adds the
    error of this rank's earlier payloads. Step 3 adds the error of earlier payloads of this chunk's mean to the mean, in
    another pass in float32. The sum of all outputs, the mean of the worker residuals and the owners' residuals is then the
    sum of the means of all inputs. What is not finite comes out as such on all ranks and is not kept.
    """

    def __init__(
        self,
        codec: Codec,
        communicator: Communicator,
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
        """Prepares for vectors of a size.

        Args:
            codec: as for `AllReduce`.
            communicator: as for `AllReduce`.
            n: as for `AllReduce`.
            exact: as for `AllReduce`.
            dtype: as for `AllReduce`.
            worker_residual: True if each rank keeps what its payloads lack; for biased codecs.
            owner_residual: True if each rank keeps what the encoded mean of its chunk lacks; for biased codecs.
            pieces: number of pieces of a chunk, equal on all ranks; by default as many as pay, see `Layout.cut`.
            plain_below: as for `AllReduce`.
            own: where tensors lie in the vector, each from a multiple of the codec's block on. What is between them fills blocks
                up: block codecs leave it out of their statistics, and it has no residual. None if the vector is one tensor.

        Raises:
            TypeError: as for `AllReduce`.
            ValueError: as for `AllReduce` and `ErrorFeedback`, `pieces` is less than one, or tensors share blocks.
        """
        super().__init__(codec, communicator, n, exact, dtype, plain_below)
        self.layout = Layout.cut(codec, n, communicator.size, pieces)
        if self.plain:
            return
        self.delivers = True
        self.reads_pieces = encodes_pieces(codec) and not worker_residual
        counts = Counts(codec, n, own, communicator.device)
        part = ExactPart(communicator, exact, dtype) if exact else None
        self._scatter = Scatter(codec, communicator, self.layout, worker_residual, part, counts)
        self._gather = Gather(codec, communicator, self.layout, owner_residual, part, counts)

    def _exchange(
        self, x: torch.Tensor, exact: torch.Tensor, seed: int, source: Source | None, deliver: Deliver | None
    ) -> Steps:
        def reduce(piece: int) -> Steps:
            payloads = yield from self._scatter.finish(piece, self._gather.exact_mean)
            self._gather.start_reduced(piece, payloads, seed)

        with lent(self.communicator, [*self._scatter.slots, *self._gather.slots, self._gather.mean]):
            yield from pipeline(
                self.layout.pieces,
                lambda piece: self._scatter.start(piece, x, seed, source, exact),
                reduce,
                lambda piece: self._gather.finish(piece, x, exact, deliver),
            )

    def residuals(self) -> dict[str, Kept | None]:
        """See `AllReduce.residuals`."""
        return {} if self.plain else {"worker": self._scatter.residuals, "owner": self._gather.residuals}

    def _start(self, name: str) -> int:
        return self.layout.shard(self.communicator.rank).start if name == "owner" else 0

    def vectors(self) -> dict[str, torch.Tensor]:
        """See `AllReduce.vectors`."""
        state = self.state_dict()
        if "owner" in state:
            own = state["owner"].new_zeros(self.layout.chunk)
            own[: state["owner"].numel()] = state["owner"]
            whole = own.new_empty(self.layout.chunk * self.communicator.size)
            self.communicator.all_gather(whole, own).wait()
            state["owner"] = whole[: self.n].clone()
        return state

    def own_vectors(self) -> dict[str, torch.Tensor]:
        """See `AllReduce.own_vectors`."""
        state = self.state_dict()
        if "owner" in state:
            whole = state["owner"].new_zeros(self.n)
            whole[self.layout.shard(self.communicator.rank)] = state["owner"]
            state["owner"] = whole
        return state

    def load_vectors(self, vectors: Mapping[str, torch.Tensor]) -> None:
        """See `AllReduce.load_vectors`."""
        shard = self.layout.shard(self.communicator.rank)
        self.load_state_dict({key: v[shard] if key == "owner" else v for key, v in vectors.items()})
