"""What other ranks have sent, and what this rank has asked for: brings the two together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch

from bagua_kernels.comm.backends.sockets.context import Context
from bagua_kernels.comm.backends.sockets.scratch import Scratch
from bagua_kernels.comm.backends.sockets.transfer import Operation, Transfer, memory, mismatch, wrong_size
from bagua_kernels.comm.failures.failure import MismatchPeerError, PeerError

Key = tuple[int, int, int]  # rank at the other end, number of the operation with its context, tag of the message

_AHEAD = 64 << 20  # bytes that are kept of what one rank sends while nothing is asked of it; more stay in the network


class Arrival:
    """A message from another rank: where it goes, what is missing of it, and who has asked for it.

    Attributes:
        own: the memory it goes to, unless that is where it was asked for.
        early: True if it began to arrive before it was asked for.
        context: of its operation; None if this rank has not made that communicator yet.
    """

    __slots__ = ("code", "context", "data", "early", "key", "left", "own", "transfer")

    def __init__(
        self,
        key: Key,
        code: int,
        transfer: Transfer | None,
        to: memoryview | torch.Tensor,
        context: Context | None = None,
    ) -> None:
        self.key = key
        self.context = context
        self.code = code
        self.transfer = transfer
        self.early = transfer is None
        self.own = to if isinstance(to, torch.Tensor) else None
        self.data = memory(to) if isinstance(to, torch.Tensor) else to
        self.left = len(self.data)


class Inbox:
    """Matches the messages that arrive with the transfers that wait for them, whichever comes first.

    It serves all contexts of a loop, because their messages come through the same sockets. A message that nobody has asked for
    yet must not keep those behind it back, or two communicators could wait for one another for ever. So while anything of a
    rank is awaited, in whatever context, all that comes from it is taken, and what is early is kept. That is bounded by what the
    other rank has under way, whose memory holds it, too. While nothing of a rank is awaited, nobody can wait for what lies
    behind an early message: `_AHEAD` bytes are kept then, and the rest stays in the network.

    Args:
        peers: the other ranks.
        done: called with each transfer whose message is complete.
        fail: ends an operation with an error.
        compare: called with rank, number and code of an operation of which a message came before it was asked for.
        departs: called with rank, context and reason when a farewell arrives.

    Attributes:
        scratch: memory for what arrives early, or may arrive anywhere.
        below: messages of operations with lower numbers are thrown away.
        contexts: those in use, by number.
        closed: the numbers of those that this rank has left, whose messages are thrown away.
    """

    def __init__(
        self,
        peers: Iterable[int],
        done: Callable[[Transfer], None],
        fail: Callable[[Operation, BaseException], None],
        compare: Callable[[int, int, int], None],
        departs: Callable[[int, int, str], None],
    ) -> None:
        self.scratch = Scratch()
        self.below = 0
        self.contexts: dict[int, Context] = {}
        self.closed: set[int] = set()
        self.departs = departs
        self._posted: dict[Key, Transfer] = {}
        self._arrivals: dict[Key, Arrival] = {}
        self._ahead = dict.fromkeys(peers, 0)
        self._wanted = dict.fromkeys(self._ahead, 0)
        self._done = done
        self._fail = fail
        self._compare = compare

    def ask(self, key: Key, transfer: Transfer, lost: BaseException | None) -> None:
        """Waits for a message.

        Args:
            key: of the message.
            transfer: where it goes.
            lost: why nothing more will come of its rank; None if it may. Raised unless all of the message is here.

        Raises:
            MismatchPeerError: if the message that has arrived is not the one that is expected.
        """
        arrival, peer = self._arrivals.get(key), transfer.peer
        if arrival is not None:
            self._check(arrival.code, len(arrival.data), transfer)
        if lost is not None and (arrival is None or arrival.left):
            raise lost
        self._wanted[peer] += 1
        if arrival is None:
            self._posted[key] = transfer
        else:
            arrival.transfer = transfer
            transfer.lane.operation.moved += len(arrival.data) - arrival.left
            if not arrival.left:
                self.arrived(arrival)

    def withdraw(self, transfers: Collection[Transfer]) -> None:
        """Waits no more for those of some transfers of which nothing has arrived."""
        for key in [key for key, transfer in self._posted.items() if transfer in transfers]:
            del self._posted[key]
            self._wanted[key[0]] -= 1

    def calls(self, number: int) -> list[tuple[int, int]]:
        """Returns rank and code of the operation of each message of a number that has arrived at least in part."""
        return [(key[0], arrival.code) for key, arrival in self._arrivals.items() if key[1] == number]

    def free(self, arrivals: Iterable[Arrival]) -> None:
        """Frees messages that have arrived in whole or in part."""
        for arrival in arrivals:
            peer = arrival.key[0]
            del self._arrivals[arrival.key]
            if arrival.transfer is not None:
                self._wanted[peer] -= 1
            if arrival.early:
                self._ahead[peer] -= len(arrival.data)

    def leave(self, context: int) -> None:
        """Frees the messages of a context, and throws away those that are still to come."""
        self.contexts.pop(context, None)
        self.closed.add(context)
        self.free([arrival for key, arrival in self._arrivals.items() if key[1] >> 64 == context])

    def clear(self) -> None:
        """Frees all memory."""
        self._posted.clear()
        self._arrivals.clear()
        self.scratch = Scratch()

    def place(self, key: Key, code: int, total: int) -> Arrival | None:
        """Returns where a message goes: to where it was asked for, else to memory of its own; None while that is used up."""
        arrival = self._arrivals.get(key)
        if arrival is not None:
            return arrival
        transfer, context = self._posted.pop(key, None), self.contexts.get(key[1] >> 64)
        if transfer is not None:
            try:
                self._check(code, total, transfer)
            except PeerError as error:
                self._wanted[key[0]] -= 1
                self._fail(transfer.lane.operation, error)
                transfer = None
        peer = key[0]
        if transfer is not None:
            to = self.scratch.take(total, torch.uint8) if transfer.data is None else transfer.data
            arrival = Arrival(key, code, transfer, to, context)
        elif not self._wanted[peer] and self._ahead[peer] + total > _AHEAD:
            # Where something is wanted it may lie behind this in the same socket.
            return None
        else:
            arrival = Arrival(key, code, None, self.scratch.take(total, torch.uint8), context)
            self._ahead[peer] += total
            self._compare(peer, key[1], code)
        self._arrivals[key] = arrival
        return arrival

    def arrived(self, arrival: Arrival) -> None:
        """Hands over a complete message, if it has been asked for."""
        transfer = arrival.transfer
        if transfer is None:
            return
        del self._arrivals[arrival.key]
        self._wanted[transfer.peer] -= 1
        if arrival.early:
            self._ahead[transfer.peer] -= len(arrival.data)
        if transfer.data is None:
            transfer.own = arrival.own
        elif arrival.own is not None:
            transfer.data[:] = arrival.data
            self.scratch.give(arrival.own)
        self._done(transfer)

    def _check(self, code: int, total: int, transfer: Transfer) -> None:
        """Raises if a message that has arrived is not the one that is expected."""
        lane, expected, rank = transfer.lane, transfer.left, transfer.rank
        if code != lane.code:
            raise different(rank, code, lane.code)
        if total != expected:
            raise MismatchPeerError(rank, *wrong_size(total, expected, lane.operation.name))


def different(peer: int, theirs: int, ours: int) -> MismatchPeerError:
    """Returns the error of an operation where rank `peer` called something else; both by their codes."""
    return MismatchPeerError(peer, *mismatch(theirs, ours))
