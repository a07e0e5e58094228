"""Letters with which ranks follow each other's rounds, where they may have taken different numbers of steps."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field

from bagua_kernels.comm import Mailbox
from bagua_kernels.errors import CollectiveTimeoutError, MismatchError, RankLostError

_LETTER = struct.Struct("<BQQ")  # its kind, a number of steps, a number of rounds; then the name of a call
_ROUND, _CALL, _WRITTEN = 0, 1, 2
_MOST = 8192  # checksums in a letter; of a model with more parameters, those of the first
_SECONDS = 0.25  # between two looks at lost ranks


@dataclass(frozen=True)
class Written:
    """A write to parameters from outside.

    Attributes:
        rounds: that the rank had begun.
        checksums: of its parameters afterwards.
    """

    rounds: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class Unequal:
    """Parameters of another rank that had to be equal, or a write that only one of two ranks had.

    Attributes:
        rank: the other one.
        own: this rank's write; None if it had none.
        other: the other rank's.
    """

    rank: int
    own: Written | None
    other: Written


@dataclass
class _Peer:
    """What is known of another rank.

    Attributes:
        steps: that it has taken, or takes part in.
        rounds: that it has begun.
        calls: at which it has arrived.
        call: the name of the last one.
        later: letters that it has sent after a call at which this rank still is; of rounds in a row, the last one.
        written: the writes to parameters that it has sent, and that this rank has not compared with its own.
    """

    steps: int = 0
    rounds: int = 0
    calls: int = 0
    call: str = ""
    later: deque[bytes] = field(default_factory=deque)
    written: deque[Written] = field(default_factory=deque)


class Letters:
    """Announces rounds that this rank has begun to the others, and takes their letters; lets all ranks meet at a call.

    A letter that came before a rank's arrival at a call belongs to what lies before the call. One that came after it belongs
    to what follows.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        """Begins with ranks that have taken no steps.

        Args:
            mailbox: carries the letters, and no others.
        """
        self._mailbox = mailbox
        self._peers = {rank: _Peer() for rank in range(mailbox.size) if rank != mailbox.rank}
        self._calls = 0
        self._at = ""
        self._written: dict[int, deque[Written]] = {rank: deque() for rank in self._peers}

    def tell(self, steps: int, rounds: int) -> None:
        """Announces to all other ranks that this one has begun a round, and takes the letters that have come meanwhile.

        Args:
            steps: with which the round is over.
            rounds: that this rank has begun.
        """
        self._send(_ROUND, steps, rounds, "")
        self.keep_last()

    def keep_last(self) -> None:
        """Takes the letters that have come, and keeps the numbers of the last one of each rank.

        Called in each round, so that letters do not pile up until the next call: a rank that others wait for hears from
        all of them in each round.
        """
        self._read(0.0)

    def tell_written(self, written: Written) -> None:
        """Announces to all other ranks that parameters were written here, which have to be equal everywhere."""
        sums = written.checksums[:_MOST]
        for rank, own in self._written.items():
            own.append(Written(written.rounds, sums))
            self._mailbox.post(rank, _LETTER.pack(_WRITTEN, 0, written.rounds) + struct.pack(f"<{len(sums)}I", *sums))

    def unequal(self, rounds: int, read: bool = True) -> Unequal | None:
        """Returns a write of another rank that this one should have had, and had not.

        Args:
            rounds: that this rank has begun.
            read: True to take the letters that have come.
        """
        if read:
            self._read(0.0)
        for rank, peer in self._peers.items():
            while peer.written and self._written[rank]:
                other, own = peer.written.popleft(), self._written[rank].popleft()
                if other != own:
                    return Unequal(rank, own, other)
            # A rank that lags behind has yet to come there.
            if peer.written and rounds > peer.written[0].rounds:
                return Unequal(rank, None, peer.written[0])
        return None

    def arrive(self, call: str, steps: int, rounds: int) -> None:
        """Announces to all other ranks that this one has come to a call, and begins no more rounds by itself.

        Args:
            call: its name, the same on all ranks.
            steps: that this rank has taken.
            rounds: that it has begun.
        """
        self._calls, self._at = self._calls + 1, call
        self._send(_CALL, steps, rounds, call)

    def wait_for_more(self, steps: int, rounds: int) -> tuple[int, int] | None:
        """Waits until another rank is ahead, or until all have come to the call.

        Args:
            steps: that this rank has taken.
            rounds: that it has begun.

        Returns:
            The most steps and rounds of another rank; None if all are at the call, and nobody is ahead.

        Raises:
            MismatchError: another rank has come to another call.
            RankLostError: a rank was lost that has not come.
            CollectiveTimeoutError: nothing came within the mailbox's timeout.
        """
        clock = self._mailbox.clock
        deadline = clock.now() + self._mailbox.timeout
        while True:
            self._check_calls()
            most_steps = max(peer.steps for peer in self._peers.values())
            most_rounds = max(peer.rounds for peer in self._peers.values())
            if most_steps > steps or most_rounds > rounds:
                return most_steps, most_rounds
            left = sorted(rank for rank, peer in self._peers.items() if peer.calls < self._calls)
            if not left:
                return None
            if self._read(_SECONDS):
                deadline = clock.now() + self._mailbox.timeout
                continue
            lost = self._mailbox.lost()
            if gone := [rank for rank in left if rank in lost]:
                text = "; ".join(f"rank {rank} was lost ({lost[rank]})" for rank in gone)
                raise RankLostError(f"{text} during {self._at}", gone)
            if clock.now() > deadline:
                raise CollectiveTimeoutError(
                    f"rank {self._mailbox.rank} is in {self._at}, and {_named(left)}, from where nothing came for "
                    f"{self._mailbox.timeout:g} s: call it on all ranks, or raise timeout=",
                    left,
                )

    def leave(self) -> None:
        """Ends the call: what other ranks have sent since they went on counts from now on."""
        for peer in self._peers.values():
            # What they have sent so far is settled. Steps may be fewer after a checkpoint was loaded.
            peer.steps = peer.rounds = 0
            later, peer.later = peer.later, deque()
            for letter in later:
                self._take(peer, letter)
        self._at = ""

    def _check_calls(self) -> None:
        for rank, peer in self._peers.items():
            if peer.calls == self._calls and peer.call != self._at:
                raise MismatchError(
                    f"rank {self._mailbox.rank} is in {self._at}, rank {rank} in {peer.call}: call the same on all ranks",
                    sorted({self._mailbox.rank, rank}),
                )

    def _send(self, kind: int, steps: int, rounds: int, call: str) -> None:
        letter = _LETTER.pack(kind, steps, rounds) + call.encode()
        for rank in self._peers:
            self._mailbox.post(rank, letter)

    def _read(self, seconds: float) -> bool:
        """Takes all letters that are there; waits for the first one. Returns False if there was none."""
        found = self._mailbox.take(seconds)
        if found is None:
            return False
        while found is not None:
            sender, letter = found
            peer = self._peers[sender]
            # A rank that is at this call, or has gone on from it.
            if self._at and peer.calls >= self._calls:
                if peer.later and letter[0] == peer.later[-1][0] == _ROUND:
                    # Steps and rounds only grow between two calls.
                    peer.later.pop()
                peer.later.append(letter)
            else:
                self._take(peer, letter)
            found = self._mailbox.take(0.0)
        return True

    def _take(self, peer: _Peer, letter: bytes) -> None:
        kind, steps, rounds = _LETTER.unpack_from(letter)
        if kind == _WRITTEN:
            rest = letter[_LETTER.size :]
            peer.written.append(Written(rounds, struct.unpack(f"<{len(rest) // 4}I", rest)))
            return
        peer.steps, peer.rounds = max(peer.steps, steps), max(peer.rounds, rounds)
        if kind == _CALL:
            peer.calls += 1
            peer.call = letter[_LETTER.size :].decode()


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]} trains" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} train"
