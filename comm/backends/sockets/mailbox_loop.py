"""The thread of a mailbox: as `Loop`, but a lost rank concerns only its partners, and letters have sockets of their own."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch

from bagua_kernels.comm.backends.sockets.channel import Channel
from bagua_kernels.comm.backends.sockets.farewell import say_farewell
from bagua_kernels.comm.backends.sockets.inbox import Arrival, Inbox, Key
from bagua_kernels.comm.backends.sockets.letters import Kind, LetterBox, LetterChannel
from bagua_kernels.comm.backends.sockets.loop import Loop
from bagua_kernels.comm.backends.sockets.transfer import Lane, Operation, Transfer
from bagua_kernels.comm.failures.failure import MismatchPeerError, PeerError
from bagua_kernels.comm.failures.stillness import Stir
from bagua_kernels.comm.mailbox import left_reason

_RANK = struct.Struct("<I")
_TOLD = struct.Struct("<QQ")  # bytes of exchanges that have left or arrived, exchanges begun


class MailboxInbox(Inbox):
    """Matches messages by number alone: two ranks may be in different exchanges, of any sizes and dtypes."""

    def ask(self, key: Key, transfer: Transfer, lost: BaseException | None) -> None:
        """See `Inbox.ask`."""
        arrival = self._arrivals.get(key)
        if key in self._posted or (arrival is not None and arrival.transfer is not None):
            raise ValueError(f"number {key[1]} is under way with rank {key[0]}: use another one")
        super().ask(key, transfer, lost)

    def place(self, key: Key, code: int, total: int) -> Arrival | None:
        """See `Inbox.place`; a message has one part."""
        if key in self._arrivals:
            raise ConnectionAbortedError(f"it sent number {key[1]} again before the first message was received")
        return super().place(key, code, total)

    def calls(self, number: int) -> list[tuple[int, int]]:
        """Returns nothing: no two exchanges have to be alike."""
        return []

    def lift_limit(self, peer: int) -> None:
        """Lets anything come that a rank has still in the network; for when that is all that will come."""
        self._wanted[peer] += 1

    def unasked(self) -> list[Arrival]:
        """Returns the messages that have arrived in whole or in part before they were asked for."""
        return [arrival for arrival in self._arrivals.values() if arrival.transfer is None]

    def _check(self, code: int, total: int, transfer: Transfer) -> None:
        lane = transfer.lane
        if (code, total) != (lane.code, transfer.left):
            theirs, ours = (
                f"{size} bytes of {dtype_of(of)}" for of, size in ((code, total), (lane.code, transfer.left))
            )
            raise MismatchPeerError(transfer.peer, f"sent {theirs}", f"expected {ours}")


class MailboxLoop(Loop):
    """Moves the messages of exchanges and letters; for its rules see `Loop`.

    Args:
        name: of the thread.
        links: the connected sockets to each other rank; the last one is for letters.
        box: where letters go.

    Attributes:
        bytes_sent: of tensors and letters, without headers.
        reasons: for each lost rank the reason; grows as they are lost.
        dropped: the ranks that `drop` named.
        waiting: the exchanges for which a thread waits.
        heard: for each rank the time at which something last came from it, or bytes last left for it.
        begun: exchanges that this rank has begun.
        awaited: for each rank that has answered the time, and the ranks for which it waited then.
    """

    _inbox_type: ClassVar[type[Inbox]] = MailboxInbox
    # Nothing takes turns here, and a message that is dropped half way ends with its only frame.
    _frame: ClassVar[int] = 1 << 62
    _inbox: MailboxInbox

    def __init__(self, name: str, links: Mapping[int, Sequence[socket.socket]], box: LetterBox) -> None:
        self.bytes_sent = self.begun = 0
        self.reasons: dict[int, str] = {}
        self.dropped: frozenset[int] = frozenset()
        self.waiting: dict[Operation, None] = {}
        self.awaited: dict[int, tuple[float, tuple[int, ...]]] = {}
        self._told = dict.fromkeys(links, (0, 0, 0.0))
        self._box = box
        self._leaving: dict[int, str] = {}
        self._ending: set[int] = set()
        self._letters = {peer: LetterChannel(peer, socks[-1], self._deliver) for peer, socks in links.items()}
        tensors = {peer: socks[:-1] for peer, socks in links.items()}
        super().__init__(name, tensors, self._count, self._letters)

    @property
    def ended(self) -> str:
        """Why the loop has ended or is about to; empty while it runs."""
        return self._stopping

    @property
    def below(self) -> int:
        """The lowest number that is still used."""
        return self._inbox.below

    def send(self, lane: Lane, peer: int, tag: int, data: memoryview) -> Transfer:
        """See `Loop.send`; a rank that is about to leave takes nothing any more."""
        if peer in self._leaving:
            raise PeerError(peer, self._leaving[peer])
        return super().send(lane, peer, tag, data)

    def why_lost(self, peer: int) -> str:
        """Returns why a rank is lost, or about to leave; else an empty text."""
        return self.reasons.get(peer) or self._leaving.get(peer, "")

    def stir(self, peer: int, asked: float = 0.0) -> tuple[Stir, bool]:
        """Returns what has moved between this rank and another one, what that one reported last, and if that is an answer.

        Args:
            peer: the other rank.
            asked: when it was asked, by `time.monotonic`.
        """
        moved, begun, at = self._told[peer]
        links = sum(channel.moved for channel in list(self._links.get(peer, ())))
        return Stir((moved, links), begun), at >= asked

    def post(self, peers: Iterable[int], kind: Kind, contents: bytes = b"") -> None:
        """Sends a frame to some ranks; from any thread."""
        self.call(partial(self._put_all, tuple(peers), kind, contents), "post")

    def lose(self, peer: int, reason: str) -> None:
        """Gives a rank up; from any thread."""
        self.call(partial(self._give_up, peer, reason), "losing a rank")

    def fail(self, operation: Operation, error: BaseException) -> None:
        """Ends an operation with an error; from any thread."""
        self.call(partial(self._fail, operation, error), operation.name)

    def drop(self, ranks: frozenset[int], below: int) -> None:
        """See `Mailbox.drop`; from any thread."""
        with self._lock:
            self.dropped |= ranks
        self.call(partial(self._drop_all, ranks, below), "drop")

    def forget(self) -> None:
        """See `Loop.forget`."""
        super().forget()
        self._box.forget()

    def _count(self, nbytes: int) -> None:
        self.bytes_sent += nbytes

    def _put_all(self, peers: Iterable[int], kind: Kind, contents: bytes) -> None:
        for peer in peers:
            self._put(peer, kind, contents)

    def _put(self, peer: int, kind: Kind, contents: bytes) -> None:
        if peer in self._ending or peer in self._leaving:
            return
        channel = self._letters[peer]
        channel.put(kind, contents)
        if kind == Kind.LETTER:
            self._count(len(contents))
        if not channel.writing:
            self._guarded(channel, self._write)

    def _deliver(self, peer: int, kind: int, contents: bytes) -> None:
        if kind == Kind.LETTER:
            self._box.put(peer, contents)
        elif kind == Kind.LEAVE:
            self._leaving[peer] = contents.decode(errors="replace")
        elif kind == Kind.TOLD:
            self._told[peer] = (*_TOLD.unpack(contents), time.monotonic())
        elif kind in (Kind.PING, Kind.ASK):
            # Not from here, in the middle of what has arrived: sending may find that the connection has ended.
            self._called.append(partial(self._answer if kind == Kind.PING else self._tell, peer))
            self._nudge()
        else:
            self.awaited[peer] = time.monotonic(), tuple(rank for (rank,) in _RANK.iter_unpack(contents))

    def _answer(self, peer: int) -> None:
        missing = {each.peer for one in list(self.waiting) for each in self._running.get(one, ()) if not each.done}
        self._put(peer, Kind.PONG, b"".join(map(_RANK.pack, sorted(missing))))

    def _tell(self, peer: int) -> None:
        self._put(peer, Kind.TOLD, _TOLD.pack(self.moved(), self.begun))

    def _compare(self, peer: int, number: int, code: int) -> None:
        """Does nothing: of one number, messages of different ranks may differ."""

    def _write(self, channel: Channel) -> None:
        before = channel.moved
        super()._write(channel)
        if channel.moved != before:
            # A kernel that takes more has got rid of some, for it keeps a few seconds' worth at most.
            self.heard[channel.peer] = time.monotonic()

    def _lose(self, channel: Channel, error: BaseException) -> None:
        """Gives a rank up after everything that has arrived from it was taken."""
        peer = channel.peer
        if peer in self._ending:
            return
        letters, *tensors = reversed(self._links[peer])
        if channel is letters and peer in self._leaving and tensors and tensors[0].fd in self._channels:
            # Its tensors may still be on the way.
            self._epoll.unregister(channel.fd)
            del self._channels[channel.fd]
            return
        self._ending.add(peer)
        self._inbox.lift_limit(peer)
        for each in (*tensors, letters):
            self._drain(each)
        self._end_connection(peer, self._leaving.get(peer, f"its connection broke: {error}"))

    def _drain(self, channel: Channel) -> None:
        with contextlib.suppress(OSError):
            if channel.parked is not None:
                channel.parked = None
                channel.parse(self._inbox)
            while channel.read(self._inbox, 1 << 30):
                pass

    def _end_connection(self, peer: int, reason: str) -> None:
        """Closes the sockets of a rank, ends what it takes part in, and frees what is not complete."""
        self.reasons[peer] = reason
        self._letters[peer].frames.clear()
        for each in self._links[peer]:
            each.out.clear()
        super()._lose(self._letters[peer], ConnectionError(reason))
        self._inbox.free([each for each in self._inbox.unasked() if each.key[0] == peer and each.left])
        for each in self._links[peer]:
            each.sock.close()
            each.discard()
        self._box.look()

    def _give_up(self, peer: int, reason: str, farewell: str = "") -> None:
        if farewell:
            self._put(peer, Kind.LEAVE, left_reason(farewell).encode())
        if peer not in self._ending:
            self._ending.add(peer)
            self._end_connection(peer, reason)

    def _drop_all(self, ranks: frozenset[int], below: int) -> None:
        self._inbox.below = below = max(below, self._inbox.below)
        for rank in ranks:
            self._give_up(rank, "it was dropped", "it dropped this rank")
        self._box.remove(ranks)
        for operation in list(self._running):
            if operation.number < below:
                self._fail(operation, RuntimeError("`drop` named its number"))
        freed = [each for each in self._inbox.unasked() if each.key[0] in ranks or each.key[1] < below]
        for channels in self._links.values():
            for channel in channels:
                if channel.arrival in freed:
                    channel.discard()
        self._inbox.free(freed)
        for peer in self._links:
            self._unpark(peer)

    def _fail(self, operation: Operation, error: BaseException) -> None:
        """Ends an operation, whose memory is the caller's again from then on."""
        transfers = self._running.get(operation, set())
        for channel in [channel for peer in {t.peer for t in transfers} for channel in self._links[peer]]:
            if channel.arrival is not None and channel.arrival.transfer in transfers:
                self._inbox.free([channel.arrival])
                channel.discard()
            for part in [part for parts in channel.out.values() for part in parts]:
                if part.transfer in transfers:
                    part.detach()
        super()._fail(operation, error)

    def _end(self) -> None:
        """Ends all operations, sends the letters that wait, and the reason of the end; then as `Loop`."""
        # Not for ever, for an exception may have come between taking and giving it back.
        owned = self._moving.acquire(timeout=5.0)
        try:
            while self._called:
                self._called.popleft()()
            for operation in list(self._running):
                operation.end(ConnectionAbortedError(self._stopping))
            self._box.end()
            whole = [peer for peer, letters in self._letters.items() if peer not in self.reasons and not letters.torn]
            say_farewell({self._letters[peer]: self._links[peer][:-1] for peer in whole}, self._stopping)
        finally:
            for channel in [channel for channels in self._links.values() for channel in channels]:
                channel.sock.close()
            if owned:
                self._moving.release()
            super()._end()


def code_of(dtype: torch.dtype) -> int:
    """Returns the code of a message; a number that does not depend on PyTorch's version."""
    return zlib.crc32(str(dtype).encode())


def dtype_of(code: int) -> str:
    """Returns the dtype of a message by its code."""
    known = {code_of(each): str(each) for each in vars(torch).values() if isinstance(each, torch.dtype)}
    return known.get(code, "an unknown dtype")
