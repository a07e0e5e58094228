"""All-reduce of sparse payloads: everyone receives everyone's."""

from __future__ import annotations

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.compressed.base import AllReduce, Deliver, Source
from bagua_kernels.comm.compressed.exact import ExactPart, mean_of
from bagua_kernels.comm.compressed.layout import Layout, first_seed, pipeline
from bagua_kernels.comm.compressed.memory import Slots, lent
from bagua_kernels.comm.compressed.phases import Messages
from bagua_kernels.comm.compressed.residuals import Kept, Residuals
from bagua_kernels.comm.work import FINISHED, Steps, Work
from bagua_kernels.compression import Codec

# A message more has to save so many bytes.
_WORTH_A_MESSAGE = 1 << 14


class SparseAllReduce(AllReduce):
    """Averages vectors of which each rank sends a few elements (as Deep Gradient Compression, Lin et al., ICLR 2018, does).

    1. Each rank encodes its vector.
    2. All-gather: everyone receives all payloads, and with them every rank's exact part. Where that would cost many more bytes
       than means do, an all-to-all brings it to its owners meanwhile, and their means go with the payloads.
    3. Everyone decodes the same bytes and adds them up in float32, in the order of the ranks (`Codec.decode_sum`).

    A rank sends its payload to every other, so that the bytes grow with the number of ranks. The mean is not encoded
    again, because the chosen elements of many ranks do not fit in one payload. The size of a payload depends on `n` alone, also
    for codecs that choose how many elements they keep, so that messages need no lengths.

    By default the vector is one piece: the largest elements of a piece are not the largest of the whole. With more pieces
    the codec chooses elements in each. While one piece is under way, the next is encoded and the last one added up.
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
        """Prepares for vectors of a size; works with dense codecs too.

        Args:
            codec: as for `AllReduce`.
            communicator: as for `AllReduce`.
            n: as for `AllReduce`.
            exact: as for `AllReduce`.
            dtype: as for `AllReduce`.
            worker_residual: True if each rank keeps what its payloads lack.
            pieces: number of pieces of the vector, equal on all ranks; 1 if None.
            plain_below: as for `AllReduce`.

        Raises:
            TypeError: as for `AllReduce`.
            ValueError: as for `AllReduce` and `ErrorFeedback`, or `pieces` is less than one.
        """
        super().__init__(codec, communicator, n, exact, dtype, plain_below)
        self.layout = layout = Layout.cut(codec, n, 1, 1 if pieces is None else pieces)
        if self.plain:
            return
        widths = [layout.part(piece, 0) for piece in range(layout.pieces)]
        lengths = [part.stop - part.start for part in widths]
        part = ExactPart(communicator, exact, dtype)
        saved = (communicator.size - 1) * (part.gathered_bytes - 2 * part.row_bytes)
        self._part = part if saved >= _WORTH_A_MESSAGE else None
        extra = part.gathered_bytes if self._part is None else part.row_bytes
        self._messages = Messages(communicator, [codec.payload_size(length) for length in lengths], extra)
        self._to_owners, self._at_owner = (
            Slots(communicator.size, [] if self._part is None else [part.row_bytes]) for _ in range(2)
        )
        self._worker = Residuals(codec, list(enumerate(lengths)), communicator.device) if worker_residual else None

    def _exchange(
        self, x: torch.Tensor, exact: torch.Tensor, seed: int, source: Source | None, deliver: Deliver | None
    ) -> Steps:
        with lent(self.communicator, [*self._messages.slots, self._to_owners, self._at_owner]):
            yield from self._in_memory(x, exact, seed)

    def _in_memory(self, x: torch.Tensor, exact: torch.Tensor, seed: int) -> Steps:
        rank, scale = self.communicator.rank, 1.0 / self.communicator.size
        owned: Work = FINISHED
        if self._part is not None:
            self._part.scatter(exact, self._to_owners[0])
            owned = self.communicator.all_to_all(self._at_owner[0].view(-1), self._to_owners[0].view(-1))

        def encode(piece: int) -> Steps:
            part, out = x[self.layout.part(piece, 0)], self._messages.own(piece)
            own = first_seed(self.codec, seed, rank, piece)
            if self._worker is None:
                self.codec.encode(part, seed=own, out=out)
            elif part.numel():
                self._worker.encode(piece, part, seed=own, out=out)
            if piece == 0:
                yield owned
                if self._part is not None:
                    self._part.reduce(self._at_owner[0], self._messages.own_extra)
                else:
                    self._messages.own_extra.zero_()
                    self._messages.own_extra.view(exact.dtype)[: self.exact].copy_(exact)
            self._messages.start(piece)

        def add_up(piece: int) -> Steps:
            payloads = yield from self._messages.finish(piece)
            if piece == 0 and self._part is not None:
                self._part.gather(self._messages.extras, exact)
            elif piece == 0 and self.exact:
                exact.copy_(mean_of(self._messages.extras.view(exact.dtype)[:, : self.exact]))
            self.codec.decode_sum(payloads.contiguous(), x[self.layout.part(piece, 0)], scale)

        yield from pipeline(self.layout.pieces, encode, add_up)

    def residuals(self) -> dict[str, Kept | None]:
        """See `AllReduce.residuals`."""
        return {} if self.plain else {"worker": self._worker}
