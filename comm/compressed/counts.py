"""How many elements of each block of a vector are tensors' own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua_kernels.comm.compressed.layout import own_counts
from bagua_kernels.compression import BlockCodec, Codec


class Counts:
    """The counts of the blocks of one vector, for the parts that it is cut into; see `BlockCodec.encode`."""

    def __init__(self, codec: Codec, n: int, own: Sequence[slice] | None, device: torch.device) -> None:
        """Counts once.

        Args:
            codec: only block codecs have a use for it.
            n: elements of the vector.
            own: the elements of each tensor in the vector; None if the vector is one tensor.
            device: where the counts are to be.
        """
        self._block = codec.block
        self._counts: torch.Tensor | None = None
        if own is not None and isinstance(codec, BlockCodec):
            # waits: once, and all streams may read it afterwards.
            self._counts = own_counts(own, n, codec.block).to(device)

    def of(self, part: slice) -> torch.Tensor | None:
        """The counts of a part's blocks, which begins with a block; None if all elements are tensors' own."""
        if self._counts is None:
            return None
        return self._counts[part.start // self._block : -(-part.stop // self._block)]
