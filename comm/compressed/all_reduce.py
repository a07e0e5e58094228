"""Compressed all-reduce: payloads instead of floats on the wire."""

from __future__ import annotations

from itertools import pairwise

import torch

from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.compression import Codec, fold_seed

FIRST_PASS, SECOND_PASS = 0, 1


class CompressedAllReduce:
    """Averages vectors of one size over all ranks, compressed in both directions (BAGUA, VLDB 2022, section 3.1, C_LP_S).

    1. The vector is cut into one chunk a rank, and each chunk is encoded.
    2. All-to-all: rank r receives everyone's payload of chunk r.
    3. Rank r decodes them, takes the mean and encodes it again, in one pass over memory (`Codec.reduce`).
    4. All-gather: everyone receives all encoded means, and with them every rank's exact part.
    5. Everyone decodes the same bytes, so the result is the same on all ranks, bit for bit.

    A rank sends about two payloads of the whole vector, whatever the number of ranks. Buffers are made once.
    """

    def __init__(self, codec: Codec, communicator: Communicator, n: int, exact: int, dtype: torch.dtype) -> None:
        """Prepares for vectors of a size.

        Args:
            codec: how chunks are encoded; equal on all ranks.
            communicator: the ranks that take part.
            n: elements of the vector.
            exact: elements of the exact part.
            dtype: of both.
        """
        size, device = communicator.size, communicator.device
        self.codec = codec
        self.communicator = communicator
        blocks = -(-n // codec.block)
        chunk = -(-blocks // size) * codec.block
        starts = [min(rank * chunk, n) for rank in range(size + 1)]
        self.chunks = [slice(begin, end) for begin, end in pairwise(starts)]
        self.lengths = [end - begin for begin, end in pairwise(starts)]
        # Every slot has room for a full chunk, so that short last chunks need no collective of uneven parts.
        slot = codec.payload_size(chunk)
        self.sizes = [codec.payload_size(length) for length in self.lengths]
        exact_bytes = -(-exact * dtype.itemsize // 16) * 16
        self.sent = torch.zeros(size, slot, dtype=torch.uint8, device=device)
        self.received = torch.empty(size, slot, dtype=torch.uint8, device=device)
        self.mean = torch.zeros(slot + exact_bytes, dtype=torch.uint8, device=device)
        self.means = torch.empty(size, slot + exact_bytes, dtype=torch.uint8, device=device)
        self.slot = slot

    def __call__(self, x: torch.Tensor, exact: torch.Tensor, *, seed: int = 0) -> None:
        """Replaces `x` by its mean, compressed, and `exact` by its mean in full precision, over all ranks.

        Args:
            x: shape (n,), contiguous.
            exact: shape (exact,), contiguous; meant to be small, since every rank receives every other's.
            seed: tells this message from all others, equal on all ranks; used by stochastic rounding.

        Raises:
            TypeError, ValueError: as `Codec.encode`.
            CommunicationError: a rank was lost or did not take part in time.
        """
        size, rank = self.communicator.size, self.communicator.rank
        if size == 1:
            return
        sizes = self.sizes
        for owner in range(size):
            self.codec.encode(
                x[self.chunks[owner]],
                seed=fold_seed(seed, FIRST_PASS, rank, owner),
                out=self.sent[owner, : sizes[owner]],
            )
        self.communicator.all_to_all(self.received.view(-1), self.sent.view(-1)).wait()

        own = self.received if sizes[rank] == self.slot else self.received[:, : sizes[rank]].contiguous()
        self.codec.reduce(
            own,
            self.lengths[rank],
            scale=1.0 / size,
            seed=fold_seed(seed, SECOND_PASS, rank),
            out=self.mean[: sizes[rank]],
        )
        exact_bytes = exact.nbytes
        self.mean[self.slot : self.slot + exact_bytes].view(exact.dtype).copy_(exact)
        self.communicator.all_gather(self.means.view(-1), self.mean).wait()

        for owner in range(size):
            self.codec.decode(self.means[owner, : sizes[owner]], x[self.chunks[owner]])
        if exact_bytes:
            exact.zero_()
            for owner in range(size):
                exact += self.means[owner, self.slot : self.slot + exact_bytes].view(exact.dtype)
            exact /= size
