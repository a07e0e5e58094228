"""Mailboxes over sockets among threads, and one whose other ends are written by hand."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TypeVar

import pytest
import torch

from bagua_kernels.comm import Communicator, Work, run_ranks
from bagua_kernels.comm.backends.sockets.letters import LetterBox
from bagua_kernels.comm.backends.sockets.mailbox import SocketMailbox
from bagua_kernels.comm.backends.sockets.mailbox_loop import MailboxLoop, code_of
from bagua_kernels.errors import RankLostError
from tests import limits

T = TypeVar("T")
HEADER = struct.Struct("<QQQIQQQ")
FRAME = struct.Struct("<BI")
LETTER, LEAVE, PING, PONG = range(4)


def schedules(count: int) -> pytest.MarkDecorator:
    """Parametrizes a test by `seeds` of random schedules: four by default, in pieces of up to fifty with `--all`."""
    bounds = [0, 4, *range(50, count + 1, 50)]
    pieces = [range(*ends) for ends in pairwise(bounds)]
    return pytest.mark.parametrize(
        "seeds",
        [pytest.param(each, id=str(each.start), marks=pytest.mark.slow if each.start else ()) for each in pieces],
    )


def over_sockets(communicator: Communicator) -> SocketMailbox:
    return SocketMailbox(communicator, host="127.0.0.1")


def among_threads(size: int, fn: Callable[[SocketMailbox], T], timeout: float = 20.0) -> list[T]:
    """Runs `fn` on ranks that are threads, over sockets; a rank leaves when it returns. The timeout is scaled."""

    def run(communicator: Communicator) -> T:
        with over_sockets(communicator) as box:
            box.timeout = limits.seconds(timeout)
            return fn(box)

    return run_ranks(size, run)


def message(number: int, data: bytes, dtype: torch.dtype = torch.uint8) -> bytes:
    """A message as it is on the wire."""
    return HEADER.pack(0, number, code_of(dtype), 0, 0, len(data), len(data)) + data


def frame(kind: int, contents: bytes = b"") -> bytes:
    """A letter as it is on the wire."""
    return FRAME.pack(kind, len(contents)) + contents


def zeros(n: int = 100) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.uint8)


def raises(work: Work, rank: int, text: str) -> None:
    with pytest.raises(RankLostError, match=text) as caught:
        work.wait()
    assert caught.value.ranks == (rank,)


class ByHand(SocketMailbox):
    """The mailbox of rank 0, and the other ends of its sockets: by rank, for tensors and for letters."""

    def __init__(self, peers: int, timeout: float) -> None:
        self.rank, self.size, self.timeout, self.device = 0, peers + 1, timeout, torch.device("cpu")
        pairs = {peer: [socket.socketpair() for _ in range(2)] for peer in range(1, peers + 1)}
        self.tensors = {peer: pair[0][1] for peer, pair in pairs.items()}
        self.letters = {peer: pair[1][1] for peer, pair in pairs.items()}
        self._box = LetterBox()
        self._loop = MailboxLoop("by hand", {peer: [one[0] for one in pair] for peer, pair in pairs.items()}, self._box)

    def answers(self, peer: int) -> list[tuple[int, bytes]]:
        """The kinds and contents of the frames that have come so far."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            while more := self.letters[peer].recv(1 << 16, socket.MSG_DONTWAIT):
                data += more
        found = []
        while data:
            kind, length = FRAME.unpack_from(data)
            found.append((kind, data[FRAME.size : FRAME.size + length]))
            data = data[FRAME.size + length :]
        return found


@contextlib.contextmanager
def by_hand(peers: int = 1, timeout: float = 20.0) -> Iterator[ByHand]:
    """See `ByHand`; closes everything. The timeout is scaled."""
    box = ByHand(peers, limits.seconds(timeout))
    try:
        yield box
    finally:
        for sock in (*box.tensors.values(), *box.letters.values()):
            sock.close()
        box.leave("the test is over")
