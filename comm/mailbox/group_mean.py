"""The mean over some ranks by messages, without a communicator of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from bagua_kernels.comm.mailbox.mailbox import Mailbox
from bagua_kernels.comm.topology.average import weighted_sum
from bagua_kernels.compression import Codec

# Writes the mean of the rows of a matrix, a row per member, to a vector.
Mean = Callable[[torch.Tensor, torch.Tensor], None]


def mean_of_rows(rows: torch.Tensor, out: torch.Tensor) -> None:
    """Adds up rows in their order, in float32 at least, and divides by their number."""
    share = 1.0 / len(rows)
    weighted_sum(dict(enumerate(rows)), dict.fromkeys(range(len(rows)), share), out)


def group_mean(
    mailbox: Mailbox, members: Sequence[int], x: torch.Tensor, number: int, *, mean: Mean = mean_of_rows
) -> None:
    """Replaces `x` by its mean over some ranks, with the same bits on all of them; blocks.

    1. Member r gets chunk r of each member's vector, and adds them up in the order of ranks.
    2. Each member gets the means of all chunks.

    Args:
        mailbox: of this rank.
        members: the ranks, in ascending order, this one among them; equal on all.
        x: shape (n,), of any dtype; overwritten.
        number: of two exchanges, this and the next one; see `Mailbox.exchange`.
        mean: what step 1 computes.
    """
    if len(members) == 1:
        return
    place, count, n = members.index(mailbox.rank), len(members), x.numel()
    bounds = [n * i // count for i in range(count + 1)]
    parts = [x[begin:end] for begin, end in itertools.pairwise(bounds)]
    others = [(i, peer) for i, peer in enumerate(members) if i != place]
    rows = x.new_empty(count, parts[place].numel())
    rows[place] = parts[place]
    mailbox.exchange({peer: rows[i] for i, peer in others}, {peer: parts[i] for i, peer in others}, number).wait()
    own = torch.empty_like(parts[place])
    mean(rows, own)
    mailbox.exchange({peer: parts[i] for i, peer in others}, {peer: own for _, peer in others}, number + 1).wait()
    parts[place].copy_(own)


class EncodedMean:
    """The mean over all ranks of what vectors are from a reference that all ranks share, by a codec with error feedback.

    1. e = e + (x - r), of which this rank sends each chunk to its owner, encoded; e lacks what was sent.
    2. The owner of a chunk has f = f + the mean of all payloads, and sends it to all, encoded; f lacks what was sent.
    3. r = r + what step 2 has sent, with the same bits on all ranks. That is the mean.

    Attributes:
        reference: r, float32; the same bits on all ranks.
        worker: e, what this rank's payloads lack so far.
        owner: f, of this rank's chunk.
    """

    def __init__(self, mailbox: Mailbox, codec: Codec, reference: torch.Tensor) -> None:
        """Begins without residuals.

        Args:
            mailbox: of this rank.
            codec: of all payloads.
            reference: shape (n,), the same on all ranks; copied.
        """
        self._mailbox, self._codec = mailbox, codec
        count, n, block = mailbox.size, reference.numel(), getattr(codec, "block", 1)
        bounds = [min(n, -(-(n * i // count) // block) * block) for i in range(count)] + [n]
        self._spans = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
        self.reference = reference.to(torch.float32, copy=True)
        self.worker = torch.zeros_like(self.reference)
        self.owner = torch.zeros_like(self.reference[self._spans[mailbox.rank]])
        self._steps = 0

    def restart(self, reference: torch.Tensor) -> None:
        """Begins anew at another reference, which is the same on all ranks."""
        self.reference.copy_(reference)
        self.worker.zero_()
        self.owner.zero_()

    def exchange(self, x: torch.Tensor, number: int) -> None:
        """Replaces `x` by the mean; blocks; collective over all ranks.

        Args:
            x: shape (n,), of floating point.
            number: of two exchanges, this and the next one; see `Mailbox.exchange`.
        """
        me, mailbox = self._mailbox.rank, self._mailbox
        self.worker.add_(x.to(torch.float32) - self.reference)
        sent = [self._encode(self.worker[span], place) for place, span in enumerate(self._spans)]
        rows = sent[me].new_empty(mailbox.size, sent[me].numel())
        rows[me] = sent[me]
        others = [peer for peer in range(mailbox.size) if peer != me]
        mailbox.exchange({peer: rows[peer] for peer in others}, {peer: sent[peer] for peer in others}, number).wait()
        if self.owner.numel():
            total = torch.empty_like(self.owner)
            self.owner.add_(self._codec.decode_sum(rows, total, 1.0 / mailbox.size))
        means = [torch.empty_like(payload) for payload in sent]
        means[me] = own = self._encode(self.owner, mailbox.size)
        mailbox.exchange({peer: means[peer] for peer in others}, dict.fromkeys(others, own), number + 1).wait()
        for span, payload in zip(self._spans, means, strict=True):
            if payload.numel():
                part = self.reference[span]
                part.add_(self._codec.decode(payload, torch.empty_like(part)))
        x.copy_(self.reference)
        self._steps += 1

    def _encode(self, residual: torch.Tensor, place: int) -> torch.Tensor:
        """A payload of a residual, which lacks it afterwards. What is not finite is sent as NaN, and not kept."""
        if not residual.numel():
            return residual.new_empty(0, dtype=torch.uint8)
        seed = (self._steps * (self._mailbox.size + 1) + place) * self._mailbox.size + self._mailbox.rank
        payload = self._codec.encode(residual, seed=seed)
        residual.sub_(self._codec.decode(payload, torch.empty_like(residual)))
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return payload
