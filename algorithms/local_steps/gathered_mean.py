"""The mean of sparse payloads that every rank receives from every other."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bagua_kernels.algorithms.engine.exchange import Exchange
from bagua_kernels.bucket import Bucket
from bagua_kernels.comm import Communicator, Work
from bagua_kernels.compression import ChunkedTopK


class GatheredMean(Exchange):
    """All ranks decode the payloads of all, in the order of the ranks: the same bits everywhere.

    Attributes:
        codec: of the payloads.
        contributors: True if each element is divided by the number of ranks that have sent it, False by that of all ranks.
    """

    one_collective = True

    def __init__(self, bucket: Bucket, communicator: Communicator, codec: ChunkedTopK, contributors: bool) -> None:
        """Begins without a payload."""
        super().__init__(bucket, communicator)
        self.codec = codec
        self.contributors = contributors
        size, device = codec.payload_size(bucket.flat.numel()), bucket.flat.device
        self.payload = torch.empty(size, dtype=torch.uint8, device=device)
        self._all = torch.empty((communicator.size, size), dtype=torch.uint8, device=device)

    def run(self, step: int) -> Iterator[Work]:
        """See `Exchange.run`; sends `payload`."""
        yield self.communicator.all_gather(self._all, self.payload)
        self.codec.mean(self._all, self.bucket.flat, contributors=self.contributors)
