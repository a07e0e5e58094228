"""A mailbox over sockets: between CPUs, and for the letters between GPUs."""

from __future__ import annotations

import math
import select
import time
import weakref
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from functools import partial

import torch

from bagua_kernels.comm.backends.sockets import mesh
from bagua_kernels.comm.backends.sockets.letters import Kind, LetterBox
from bagua_kernels.comm.backends.sockets.mailbox_loop import MailboxLoop, code_of
from bagua_kernels.comm.backends.sockets.transfer import Lane, Operation, Transfers
from bagua_kernels.comm.communicator import Communicator
from bagua_kernels.comm.failures.failure import MismatchPeerError
from bagua_kernels.comm.failures.forked import FORKED
from bagua_kernels.comm.failures.liveness import Liveness
from bagua_kernels.comm.failures.session import Session
from bagua_kernels.comm.failures.stillness import Stillness, Stir
from bagua_kernels.comm.mailbox import Mailbox, late_error, left_reason, lost_error
from bagua_kernels.comm.work import Pending, Work
from bagua_kernels.errors import CommunicationError, MismatchError

_BRIEF = 64 << 10  # bytes of an exchange that are sent on the caller's thread
_LOOKS = 32  # looks at the other ranks within the timeout; after the first quarter they ask whether the ranks are there
_LONGEST_PAUSE = 1.0  # seconds between two of these


class SocketMailbox(Mailbox):
    """The mailbox of a rank that is joined to each other rank by two sockets: one for tensors, one for letters.

    One thread moves everything. It keeps up to 64 MiB that a rank sends before it is asked for; more stays in the network.
    While something of that rank is awaited it keeps all, because that may lie behind it. Letters have no limit.

    Making one is collective over the communicator, which is not used afterwards.

    Args:
        communicator: of the same ranks.
        host: the address to listen on; by default that of the interface which Gloo would use.
        tensors: False if only letters will be sent.

    Raises:
        CommunicationError: if the ranks cannot connect.
    """

    _liveness: weakref.ref[Liveness] | None = None
    _members: tuple[int, ...] = ()  # as numbers of the world

    def __init__(self, communicator: Communicator, *, host: str = "", tensors: bool = True) -> None:
        if not hasattr(select, "epoll"):
            raise ValueError("SocketMailbox needs epoll, which only Linux has")
        self.rank, self.size, self.timeout = communicator.rank, communicator.size, communicator.timeout
        self.device = torch.device("cpu")
        secret = communicator._sealed().secret.derive("mailbox")
        deadline = time.monotonic() + self.timeout
        links = mesh.connect_over(communicator, 1 + tensors, host, secret, deadline)
        self._box = LetterBox()
        self._loop = MailboxLoop(f"bagua_kernels mailbox of rank {self.rank}", links, self._box)
        session = getattr(communicator, "session", None)
        if isinstance(session, Session) and session.liveness is not None:
            # Who waits for this rank elsewhere learns what moves here.
            session.liveness.follow(self._loop)
            self._liveness = weakref.ref(session.liveness)
            self._members = session.members
        weakref.finalize(self, self._loop.stop, left_reason("its mailbox was forgotten, or its process exits"))

    @property
    def bytes_sent(self) -> int:
        """See `Mailbox.bytes_sent`."""
        return self._loop.bytes_sent

    def wake(self) -> None:
        """See `Mailbox.wake`."""
        self._box.wake()

    def ask(self, rank: int) -> None:
        """See `Mailbox.ask`."""
        self._loop.post([rank], Kind.ASK)

    def stir(self, rank: int) -> Stir | None:
        """See `Mailbox.stir`."""
        return self._loop.stir(rank)[0]

    def lost(self) -> dict[int, str]:
        """See `Mailbox.lost`; dropped ranks are in it although the loop may not have come to them yet."""
        return {**dict.fromkeys(self._loop.dropped, "it was dropped"), **self._loop.reasons}

    def leave(self, reason: str = "", culprits: Collection[int] = ()) -> None:
        """See `Mailbox.leave`; takes up to a second if the host of another rank does not answer."""
        if self._liveness is not None and (liveness := self._liveness()) is not None:
            liveness.blamed.update(self._members[rank] for rank in culprits if rank < self.size and rank != self.rank)
        self._loop.stop(left_reason(reason, culprits))

    def _unusable(self) -> str:
        return self._loop.ended

    def _exchange(self, outputs: dict[int, torch.Tensor], inputs: dict[int, torch.Tensor], number: int) -> Work:
        if number < self._loop.below:
            raise ValueError(f"expected a number from {self._loop.below} on, which `drop` set, got {number}")
        messages = [partial(_send, peer, tensor.view(-1)) for peer, tensor in inputs.items()]
        messages += [partial(_receive, peer, tensor.view(-1)) for peer, tensor in outputs.items()]
        # What concerns a lost rank last, for it ends the exchange: the other partners get what is sent to them.
        messages.sort(key=lambda message: bool(self._loop.why_lost(message.args[0])))
        brief = sum(tensor.nbytes for tensor in inputs.values()) <= _BRIEF
        operation = Operation(f"exchange #{number}", number, 0, iter(messages), len(messages), brief)
        self._loop.begun += 1
        if self._liveness is not None and (liveness := self._liveness()) is not None:
            liveness.begun += 1
        self._loop.submit(operation)
        return SocketMailboxWork(self, operation)

    def _post(self, dst: int, letter: bytes) -> None:
        self._loop.post([dst], Kind.LETTER, letter)

    def _take(self, timeout: float, known: Mapping[int, str] | None) -> tuple[int, bytes] | None:
        letter = self._box.take(timeout, None if known is None else lambda: self.lost() != known)
        if letter is None:
            self._check_usable()
        return letter

    def _drop(self, ranks: frozenset[int], below: int) -> None:
        self._loop.drop(ranks, below)


def _send(peer: int, tensor: torch.Tensor, lane: Lane) -> Transfers:
    lane.tag, lane.code = 0, code_of(tensor.dtype)
    yield [lane.send(peer, tensor)]


def _receive(peer: int, tensor: torch.Tensor, lane: Lane) -> Transfers:
    lane.tag, lane.code = 0, code_of(tensor.dtype)
    yield [lane.receive(peer, tensor)]


class SocketMailboxWork(Pending):
    """One rank's part of an exchange under way.

    When nothing has moved for a quarter of the timeout it asks the ranks that it waits for whether they are there. The answer
    names the ranks that they wait for, which are asked in turn: the rank at fault may be no partner of this exchange. Their
    answers contain what they move, too: the timeout counts from when something last moved, see `Stillness`.
    """

    def __init__(self, mailbox: SocketMailbox, operation: Operation) -> None:
        super().__init__()
        self._mailbox = mailbox
        self._operation = operation
        self._asked: dict[int, float] = {}
        self._still = Stillness(0.0)

    def is_completed(self) -> bool:
        """Returns True if `wait` would return, or raise, at once."""
        return self._done or self._error is not None or self._operation.is_completed()

    def _complete(self) -> None:
        loop = self._mailbox._loop
        if loop.ended == FORKED:
            raise CommunicationError(f"{self._operation.name} was given up: {FORKED}")
        loop.waiting[self._operation] = None
        try:
            self._wait()
        finally:
            loop.waiting.pop(self._operation, None)

    def _wait(self) -> None:
        mailbox, timeout = self._mailbox, self._mailbox.timeout
        started = self._now() if self._started is None else self._started
        self._still = still = Stillness(started)
        pause, missing = min(timeout / _LOOKS, _LONGEST_PAUSE), list[int]()
        while not self._ended(pause):
            # Empty if the loop is busy.
            missing = self._operation.missing() or missing
            behind = self._behind(missing)
            now = self._now()
            still.own(self._operation.moved, now)
            for peer in behind:
                stir, answered = mailbox._loop.stir(peer, self._asked.get(peer, math.inf))
                # Its first answer is no progress: what it had sent before is of an earlier wait.
                still.other((peer, answered), stir, now)
            late = now - still.since() - timeout
            if late >= 0 and (late >= min(timeout / 4, _LONGEST_PAUSE) or not self._unanswered(behind)):
                self._give_up(missing, behind)
                return
            if now >= still.since() + timeout / 4:
                for peer in behind:
                    self._asked.setdefault(peer, now)
                mailbox._loop.post(behind, Kind.PING)
                mailbox._loop.post(behind, Kind.ASK)

    def _ended(self, seconds: float) -> bool:
        """Returns True if the exchange has ended well within some seconds; raises if it has failed."""
        try:
            self._operation.wait(timedelta(seconds=max(0.0, seconds)))
            return True
        except RuntimeError as error:
            if not self._operation.is_completed():
                return False
            if self._operation.error is None:
                return True
            raise self._failure(self._operation.error) from error

    def _behind(self, missing: Iterable[int]) -> list[int]:
        """Returns the ranks that are missing, those that these wait for by their answers, and so on."""
        found, follow = list[int](), list(missing)
        while follow:
            peer = follow.pop()
            if peer not in found and peer != self._mailbox.rank:
                found.append(peer)
                answered, awaited = self._mailbox._loop.awaited.get(peer, (0.0, ()))
                if answered >= self._asked.get(peer, math.inf):
                    follow.extend(awaited)
        return found

    def _unanswered(self, behind: list[int]) -> bool:
        """Returns True if some ranks have not answered and have not been asked for long enough to be silent."""
        loop, silent = self._mailbox._loop, self._silent()
        questions = [peer for peer in behind if loop.heard[peer] < self._asked.get(peer, math.inf)]
        return any(peer not in silent and peer not in loop.reasons for peer in questions)

    def _silent(self) -> dict[int, str]:
        """Returns the ranks that have been asked and not answered for a quarter of the timeout, with the reason."""
        now, heard, patience = self._now(), self._mailbox._loop.heard, self._mailbox.timeout / 4
        silent = [peer for peer, asked in self._asked.items() if now - max(heard[peer], asked) >= patience]
        return {peer: f"nothing came from it for {now - heard[peer]:.1f} s" for peer in silent}

    def _lost(self) -> dict[int, str]:
        """Returns the ranks that an error names as lost."""
        loop = self._mailbox._loop
        return {peer: why for peer, why in {**self._silent(), **loop.reasons}.items() if peer not in loop.dropped}

    def _give_up(self, missing: list[int], behind: list[int]) -> None:
        """Ends an exchange whose time has run out: raises, unless it has ended just now."""
        mailbox, name, loop = self._mailbox, self._operation.name, self._mailbox._loop
        for peer, reason in self._silent().items():
            loop.lose(peer, reason)
        lost, error = self._lost(), CommunicationError()
        # Partners that have given up just now wait for nobody any more.
        if culprits := {*behind, *self._asked} & lost.keys():
            error = lost_error(name, culprits, lost)
        else:
            error = late_error(name, mailbox.timeout, missing, lost, self._still.told(self._now()))
        loop.fail(self._operation, error)
        if not self._ended(1.0):
            raise error

    def _failure(self, error: BaseException) -> CommunicationError:
        mailbox, name = self._mailbox, self._operation.name
        if isinstance(error, CommunicationError):
            return error
        if isinstance(error, MismatchPeerError):
            text = f"in {name} rank {error.peer} {error.theirs} where this rank {error.ours}"
            return MismatchError(f"{text}: make both ends use the same size and dtype", (mailbox.rank, error.peer))
        peer = getattr(error, "peer", None)
        if peer is not None:
            return lost_error(name, [peer], {**self._lost(), peer: mailbox._loop.why_lost(peer)})
        return CommunicationError(f"{name} was given up: {error}")
