"""Messages between single ranks: no rank waits for all others, and the loss of a rank concerns its partners only."""

from __future__ import annotations

import abc
import re
from collections.abc import Collection, Iterable, Mapping
from types import TracebackType

import torch

from bagua_kernels.comm.collectives import check_tensor
from bagua_kernels.comm.failures.stillness import Stir
from bagua_kernels.comm.mailbox.clock import Clock, RealClock
from bagua_kernels.comm.work import FINISHED, Work
from bagua_kernels.errors import CollectiveTimeoutError, CommunicationError, RankLostError, culprits_of

LONGEST_LETTER = 64 << 10  # bytes
NUMBERS = 1 << 63
_CULPRITS = re.compile(r"; at fault: ranks? (\d{1,9}(?:, \d{1,9})*)$")


class Mailbox(abc.ABC):
    """Messages between single ranks. They arrive whether or not their receiver waits; a lost rank concerns its partners only.

    `exchange` moves tensors, `post` and `take` move letters: a few bytes that no tensor delays. Any thread may call any
    method at any time. Tensors are dense, contiguous and on `device`; they are taken as flat. Tensors without elements are
    not sent.

    Attributes:
        rank: this process's number, from 0.
        size: the number of ranks.
        device: where the tensors must be.
        timeout: seconds after which a wait for an exchange raises an error, from when something of it last moved.
        clock: by which its timeouts run.
    """

    clock: Clock = RealClock()
    rank: int
    size: int
    device: torch.device
    timeout: float

    @property
    @abc.abstractmethod
    def bytes_sent(self) -> int:
        """Bytes of the tensors and letters that this rank has sent, without headers."""

    def exchange(self, outputs: Mapping[int, torch.Tensor], inputs: Mapping[int, torch.Tensor], number: int) -> Work:
        """Sends to some ranks and receives from some, all at once.

        A message matches by the two ranks and the number. Two ranks use a number once in each direction. Exchanges may be
        started in any order. Outputs hold values, and inputs may be changed, once `wait` of the work has returned.

        `wait` raises `RankLostError` if a partner is lost, and `CollectiveTimeoutError` if nothing has moved for `timeout`.
        Other exchanges go on.

        Args:
            outputs: for each rank to hear from, the tensor that receives its message.
            inputs: the tensor for each destination; several ranks may get the same tensor.
            number: from 0 to 2^63 - 1; not below the last `drop`.
        """
        self._check_usable()
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < NUMBERS:
            raise ValueError(f"expected number to be an int from 0 to 2^63 - 1, got {number!r}")
        given = {}
        for name, tensors in (("outputs", outputs), ("inputs", inputs)):
            for peer in tensors:
                self._check_peer(name, peer)
            checked = {peer: check_tensor("exchange", name, each, self.device) for peer, each in tensors.items()}
            given[name] = {peer: each for peer, each in checked.items() if each.numel()}
        written = [each.data_ptr() for each in given["outputs"].values()]
        if len({*written}) < len(written) or not {*written}.isdisjoint(
            each.data_ptr() for each in given["inputs"].values()
        ):
            raise ValueError(
                "exchange expects each output to have memory of its own, got one tensor twice: receive into a copy"
            )
        if not given["outputs"] and not given["inputs"]:
            return FINISHED
        return self._exchange(given["outputs"], given["inputs"], number)

    def post(self, dst: int, letter: bytes) -> None:
        """Sends a letter of at most 64 KiB, and never blocks; letters to one rank arrive in order.

        A letter to a lost rank is dropped.
        """
        self._check_usable()
        self._check_peer("dst", dst)
        if not isinstance(letter, bytes | bytearray | memoryview):
            raise TypeError(f"expected letter to be bytes, got {type(letter).__name__}")
        letter = bytes(letter)
        if len(letter) > LONGEST_LETTER:
            raise ValueError(
                f"expected a letter of at most {LONGEST_LETTER} bytes, got {len(letter)}: send it by `exchange`"
            )
        self._post(dst, letter)

    def take(self, timeout: float | None = None, known: Mapping[int, str] | None = None) -> tuple[int, bytes] | None:
        """Returns the sender and the bytes of the next letter, or None if none has come in time.

        Args:
            timeout: seconds to wait; by default the mailbox's timeout.
            known: what `lost` has returned: the wait ends, too, when it returns something else. None to wait for letters alone.
        """
        self._check_usable()
        return self._take(self.timeout if timeout is None else timeout, known)

    @abc.abstractmethod
    def wake(self) -> None:
        """Lets the next call of `take`, or the one that waits, return None at once if there is no letter."""

    def ask(self, rank: int) -> None:  # noqa: B027
        """Asks a rank what it moves; `stir` returns the answer once it is here."""

    def stir(self, rank: int) -> Stir | None:
        """Returns what has moved to and from a rank, and what that one reported; None where that is not known."""
        return None

    @abc.abstractmethod
    def lost(self) -> Mapping[int, str]:
        """Returns the ranks that are lost, with the reasons.

        A rank is lost if its connection broke, if it left, or if `drop` named it. A rank is also lost if it does not
        answer for a quarter of the timeout while an exchange runs out of time. A rank that left is named once all that it
        had sent has arrived.
        """

    def drop(self, ranks: Collection[int] = (), below: int = 0) -> None:
        """Frees what has arrived and will not be asked for; later messages of that kind are thrown away.

        Args:
            ranks: nothing more is exchanged with these; they count as lost.
            below: the lowest number that is still used; exchanges under way below it fail.
        """
        self._check_usable()
        for rank in ranks:
            self._check_peer("ranks", rank)
        self._drop(frozenset(ranks), below)

    @abc.abstractmethod
    def leave(self, reason: str = "", culprits: Collection[int] = ()) -> None:
        """Ends this rank's part without waiting for other ranks; calling it again does nothing.

        Letters that were posted are still sent. Exchanges under way fail here, and later calls raise
        `CommunicationError`. The other ranks find this rank in `lost` with the reason.

        Args:
            reason: for the errors of other ranks.
            culprits: ranks because of which this one leaves; errors name these in its place.
        """

    def __enter__(self) -> Mailbox:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves; with the error as the reason if the block raised."""
        self.leave("" if error is None else f"it raised {type(error).__name__}: {error}", culprits_of(error))

    def _check_usable(self) -> None:
        if reason := self._unusable():
            raise CommunicationError(f"this mailbox cannot be used any more: {reason}")

    def _check_peer(self, name: str, rank: int) -> None:
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise TypeError(f"expected {name} to be an int, got {rank!r}")
        if not 0 <= rank < self.size:
            raise ValueError(f"expected {name} to be a rank from 0 to {self.size - 1}, got {rank}")
        if rank == self.rank:
            raise ValueError(f"expected {name} to be another rank, got this rank {rank}")

    @abc.abstractmethod
    def _unusable(self) -> str:
        """Returns why the mailbox cannot be used, or an empty text."""

    @abc.abstractmethod
    def _exchange(self, outputs: dict[int, torch.Tensor], inputs: dict[int, torch.Tensor], number: int) -> Work: ...

    @abc.abstractmethod
    def _post(self, dst: int, letter: bytes) -> None: ...

    @abc.abstractmethod
    def _take(self, timeout: float, known: Mapping[int, str] | None) -> tuple[int, bytes] | None: ...

    @abc.abstractmethod
    def _drop(self, ranks: frozenset[int], below: int) -> None: ...


def lost_error(name: str, partners: Iterable[int], lost: Mapping[int, str]) -> RankLostError:
    """Returns the error of an exchange with a lost rank.

    It names all lost ranks. A rank that left because of others is no culprit, so that these are named in its place.

    Args:
        name: of the exchange.
        partners: the lost ranks that take part in it.
        lost: all lost ranks, with the reasons.
    """
    first = sorted(partners)
    text = "; ".join(f"rank {rank} was lost ({lost[rank]})" for rank in first) + f" during {name}"
    others = [f"rank {rank} ({lost[rank]})" for rank in sorted(lost) if rank not in first]
    return RankLostError(text + f"; lost as well: {', '.join(others)}" * bool(others), _at_fault({*first, *lost}, lost))


def late_error(
    name: str, timeout: float, missing: Iterable[int], lost: Mapping[int, str], progress: str = ""
) -> CollectiveTimeoutError:
    """Returns the error of an exchange whose time has run out although its partners still answer.

    Args:
        name: of the exchange.
        timeout: seconds in which nothing has moved.
        missing: the ranks that it waits for.
        lost: all lost ranks, with the reasons.
        progress: how much of it had moved before, in words; empty for nothing.
    """
    ranks = sorted(missing)
    who = f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}" if ranks else "some of its ranks"
    text = f"{name} did not finish within {timeout:g} s: {who} did not take part"
    text += f" to the end ({progress})" * bool(progress)
    others = "".join(f"; rank {rank} was lost ({lost[rank]})" for rank in sorted(lost))
    return CollectiveTimeoutError(f"{text}{others}; make both ends use the number, or raise timeout=", ranks)


def left_reason(reason: str, culprits: Collection[int] = ()) -> str:
    """Returns why a rank that left is lost; its end names those because of whom it left."""
    text = f"it left: {reason}" if reason else "it left"
    ranks = ", ".join(map(str, sorted(culprits)))
    return f"{text}; at fault: {'ranks' if len(culprits) > 1 else 'rank'} {ranks}" if ranks else text


def _at_fault(ranks: Iterable[int], lost: Mapping[int, str]) -> list[int]:
    """Returns the ranks at whose feet others have laid their end; those that blame nobody are at fault themselves."""
    found, passed, follow = set[int](), set[int](), list(ranks)
    while follow:
        rank = follow.pop()
        if rank in passed:
            continue
        passed.add(rank)
        blamed = _CULPRITS.search(lost.get(rank, ""))
        others = [int(other) for other in blamed[1].split(", ") if int(other) != rank] if blamed else []
        follow += others
        if not others:
            found.add(rank)
    # Ranks that blame one another in a circle leave nobody.
    return sorted(found or passed)
