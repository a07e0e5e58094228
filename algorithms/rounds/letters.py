"""Letters with which ranks follow each other's rounds while they have different numbers of batches."""

from __future__ import annotations

import struct
import time

from bagua_kernels.comm import Mailbox
from bagua_kernels.errors import CollectiveTimeoutError, RankLostError

_LETTER = struct.Struct("<BQ")  # its kind, and a number of steps
TAKES_PART, IS_THROUGH = 0, 1


def tell(mailbox: Mailbox, kind: int, steps: int) -> None:
    """Sends a letter to all other ranks.

    Args:
        mailbox: carries it.
        kind: `TAKES_PART` in the round after the steps, or `IS_THROUGH`.
        steps: number of steps that this rank has taken.
    """
    letter = _LETTER.pack(kind, steps)
    for peer in range(mailbox.size):
        if peer != mailbox.rank:
            mailbox.post(peer, letter)


def hear(mailbox: Mailbox, left: set[int]) -> tuple[int, int, int]:
    """Returns the next letter's sender, kind and number of steps.

    Args:
        mailbox: brings it.
        left: ranks that are not through.

    Raises:
        RankLostError: one of them was lost.
        CollectiveTimeoutError: nothing came within the mailbox's timeout.
    """
    deadline = time.monotonic() + mailbox.timeout
    while True:
        found = mailbox.take(0.25)
        if found is not None:
            peer, letter = found
            return peer, *_LETTER.unpack(letter)
        lost = mailbox.lost()
        if gone := sorted(left & set(lost)):
            raise RankLostError(
                f"{'; '.join(f'rank {rank} was lost ({lost[rank]})' for rank in gone)} during join()", gone
            )
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"in join() ranks {sorted(left)} told nothing for {mailbox.timeout:g} s: let them enter join(), or "
                "raise timeout=",
                sorted(left),
            )
