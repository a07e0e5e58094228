"""The mean of models over all ranks by messages, of which only differences from the last mean are sent, encoded."""

from __future__ import annotations

import torch

from bagua_kernels.comm.compressed.layout import Layout, first_seed, length, second_seed
from bagua_kernels.comm.compressed.residuals import Residuals
from bagua_kernels.comm.mailbox import Mailbox
from bagua_kernels.comm.work import FINISHED, Work
from bagua_kernels.compression import Codec


class _Alone:
    """What an `EncodedMean` needs of the mailbox of a rank that is alone."""

    rank, size = 0, 1

    def exchange(self, receive: object, send: object, number: int) -> Work:
        """See `Mailbox.exchange`; there is nobody."""
        return FINISHED


class EncodedMean:
    """The mean over all ranks of what vectors are from a reference that all ranks share, by a codec with error feedback.

    1. e = e + (x - r), of which this rank sends each chunk to its owner, encoded; e lacks what was sent.
    2. The owner of a chunk has f = f + the mean of all payloads, and sends it to all, encoded; f lacks what was sent.
    3. r = r + what step 2 has sent, with the same bits on all ranks. That is the mean.

    Attributes:
        reference: r, float32; the same bits on all ranks.
    """

    def __init__(self, mailbox: Mailbox | _Alone, codec: Codec, reference: torch.Tensor) -> None:
        """Begins without residuals.

        Args:
            mailbox: of this rank.
            codec: of all payloads.
            reference: shape (n,), the same on all ranks; copied.

        Raises:
            ValueError: the codec allows no error feedback.
        """
        self._mailbox, self._codec = mailbox, codec
        layout = Layout.cut(codec, reference.numel(), mailbox.size, pieces=1)
        self._shards = [layout.shard(owner) for owner in range(mailbox.size)]
        self.reference = reference.to(torch.float32, copy=True)
        parts = [(owner, length(shard)) for owner, shard in enumerate(self._shards)]
        self._worker = Residuals(codec, parts, reference.device)
        self._owner = Residuals(codec, parts[mailbox.rank : mailbox.rank + 1], reference.device)
        self._steps = 0
        if mailbox.size > 1:
            # A courier that compiles kernels answers nobody meanwhile, and would be taken for lost.
            EncodedMean(_Alone(), codec, reference).exchange(torch.zeros_like(reference), 0)

    @property
    def worker(self) -> torch.Tensor:
        """A copy of e, what this rank's payloads lack so far."""
        return self._worker.state()

    @property
    def owner(self) -> torch.Tensor:
        """A copy of f, of this rank's chunk."""
        return self._owner.state()

    def residual_norms(self) -> tuple[float, float]:
        """Returns the Euclidean norms of e and f."""
        # waits: for statistics.
        return float(self._worker.norm()), float(self._owner.norm())

    def restart(self, reference: torch.Tensor) -> None:
        """Begins anew at another reference, which is the same on all ranks."""
        self.reference.copy_(reference)
        self._worker.reset()
        self._owner.reset()

    def exchange(self, x: torch.Tensor, number: int) -> None:
        """Replaces `x` by the mean; blocks; collective over all ranks.

        Args:
            x: shape (n,), of floating point.
            number: of two exchanges, this and the next one; see `Mailbox.exchange`.
        """
        me, mailbox, codec, step = self._mailbox.rank, self._mailbox, self._codec, self._steps
        others = [peer for peer in range(mailbox.size) if peer != me]
        sizes = [codec.payload_size(length(shard)) for shard in self._shards]
        sent = [x.new_empty(size, dtype=torch.uint8) for size in sizes]
        means = [torch.empty_like(payload) for payload in sent]
        rows = x.new_empty(mailbox.size, sizes[me], dtype=torch.uint8)
        difference = x.to(torch.float32) - self.reference
        for owner, shard in enumerate(self._shards):
            if length(shard):
                seed = first_seed(codec, step, me, owner)
                self._worker.encode(owner, difference[shard], seed=seed, out=sent[owner])
        rows[me] = sent[me]
        mailbox.exchange({peer: rows[peer] for peer in others}, {peer: sent[peer] for peer in others}, number).wait()
        if size := length(self._shards[me]):
            total = codec.decode_sum(rows, difference.new_empty(size), 1.0 / mailbox.size)
            self._owner.encode(me, total, seed=second_seed(codec, step, me), out=means[me])
        mailbox.exchange({peer: means[peer] for peer in others}, dict.fromkeys(others, means[me]), number + 1).wait()
        for shard, payload in zip(self._shards, means, strict=True):
            if payload.numel():
                part = self.reference[shard]
                part.add_(codec.decode(payload, torch.empty_like(part)))
        x.copy_(self.reference)
        self._steps += 1
