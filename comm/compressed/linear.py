"""All-reduce of payloads that the network itself adds up."""

from __future__ import annotations

from collections.abc import Generator

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.compressed.base import AllReduce, Deliver, Source
from bagua_kernels.comm.compressed.layout import Layout, first_seed, length, pipeline
from bagua_kernels.comm.compressed.memory import Slots, lent
from bagua_kernels.comm.compressed.residuals import Kept, Residuals
from bagua_kernels.comm.reduction import ReduceOp
from bagua_kernels.comm.work import FINISHED, Steps, Work
from bagua_kernels.compression import BlockCodec, Codec, TernGrad
from bagua_kernels.compression.codec import Summable


class LinearAllReduce(AllReduce):
    """Averages vectors whose codec is linear: the numbers in the payloads are added by the communicator's all-reduce.

    1. Where ranks must share scales (`TernGrad`; Wen et al., NeurIPS 2017, section 3.2), an all-reduce finds the greatest.
    2. Each rank encodes its vector.
    3. All-reduce of that part of the payloads which may be added (`Summable.summable`), in its own dtype: a mean of floats, a
       sum of integers.
    4. Everyone decodes the same bytes, sums of integers divided by the number of ranks.

    The mean is rounded at most once by the codec, and by the all-reduce as its dtype has it: 16-bit floats once an addition.
    A rank sends as many bytes as a ring sends of that dtype. Pieces of the vector go through steps 2 to 4 one behind the other.
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
        pieces: int | None = None,
        plain_below: int = 0,
    ) -> None:
        """Prepares for vectors of a size.

        Args:
            codec: as for `AllReduce`, and linear.
            communicator: as for `AllReduce`.
            n: as for `AllReduce`.
            exact: as for `AllReduce`.
            dtype: as for `AllReduce`.
            worker_residual: True if each rank keeps what its payloads lack; what the network rounds is not kept.
            pieces: number of pieces of the vector, equal on all ranks; by default as many as pay.
            plain_below: as for `AllReduce`.

        Raises:
            TypeError: as for `AllReduce`.
            ValueError: as for `AllReduce` and `ErrorFeedback`, the codec is not linear, or its integers cannot hold the sum of
                so many ranks.
        """
        super().__init__(codec, communicator, n, exact, dtype, plain_below)
        if not codec.linear or not isinstance(codec, Summable):
            raise ValueError(
                f"the payloads of {codec!r} cannot be added by the network; use CompressedAllReduce, or all_reduce_for"
            )
        # The network cuts each piece into one part a rank again.
        whole = Layout.cut(codec, n, communicator.size, pieces)
        self.layout = layout = Layout.cut(codec, n, 1, whole.pieces if pieces is None else pieces)
        if self.plain:
            return
        check_range(codec, communicator.size)
        self._summable = codec
        lengths = [length(layout.part(piece, 0)) for piece in range(layout.pieces)]
        self._payloads = Slots(1, [codec.payload_size(elements) for elements in lengths])
        self._worker = Residuals(codec, list(enumerate(lengths)), communicator.device) if worker_residual else None

    def _exchange(
        self, x: torch.Tensor, exact: torch.Tensor, seed: int, source: Source | None, deliver: Deliver | None
    ) -> Steps:
        communicator, codec, size = self.communicator, self.codec, self.communicator.size
        exact_mean = communicator.all_reduce(exact, ReduceOp.AVG)
        scales = yield from self._shared_scales(x)
        works: list[Work] = [FINISHED, FINISHED]

        def encode(piece: int) -> None:
            part, out = self.layout.part(piece, 0), self._payloads[piece][0]
            own = first_seed(codec, seed, communicator.rank, piece)
            if self._worker is not None and out.numel():
                self._worker.encode(piece, x[part], seed=own, out=out)
            elif isinstance(codec, TernGrad):
                blocks = slice(part.start // codec.block, -(-part.stop // codec.block))
                codec.encode(x[part], seed=own, out=out, scales=scales[blocks])
            else:
                codec.encode(x[part], seed=own, out=out)
            numbers = self._summable.summable(out)
            op = ReduceOp.AVG if numbers.is_floating_point() else ReduceOp.SUM
            works[piece % 2] = communicator.all_reduce(numbers, op)

        def decode(piece: int) -> Steps:
            yield works[piece % 2]
            payloads, out = self._payloads[piece], x[self.layout.part(piece, 0)]
            if self._summable.summable(payloads[0]).is_floating_point():
                codec.decode(payloads[0], out)
            else:
                codec.decode_sum(payloads, out, 1.0 / size)

        with lent(communicator, [self._payloads]):
            yield from pipeline(self.layout.pieces, encode, decode)
        yield exact_mean

    def _shared_scales(self, x: torch.Tensor) -> Generator[Work, None, torch.Tensor]:
        """The scales that all ranks share, shape (blocks,), int32; empty for codecs that need none."""
        if not isinstance(self.codec, TernGrad):
            return torch.empty(0, dtype=torch.int32, device=x.device)
        scales = self.codec.scales(x)
        yield self.communicator.all_reduce(scales, ReduceOp.MAX)
        return scales

    def residuals(self) -> dict[str, Kept | None]:
        """See `AllReduce.residuals`."""
        return {} if self.plain else {"worker": self._worker}


def check_range(codec: Codec, ranks: int) -> None:
    """Raises if the sum of that many ranks' codes does not fit in the codec's integers.

    Raises:
        ValueError: it does not.
    """
    if isinstance(codec, BlockCodec) and codec.linear:
        most = ((1 << (codec.rule.bits - 1)) - 1) // codec.rule.levels
        if ranks > most:
            raise ValueError(
                f"the codes of {codec!r} have {codec.rule.bits} bits and can be added over up to {most} ranks, got {ranks}; "
                "use TernGrad() with CompressedAllReduce, or all-reduce in groups of ranks"
            )
