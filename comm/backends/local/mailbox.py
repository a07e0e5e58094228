"""Messages between ranks that are threads, as late as a `Work` allows."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from bagua_kernels.comm.backends.local.communicator import LocalCommunicator
from bagua_kernels.comm.backends.local.world import LocalWorld, synchronize
from bagua_kernels.comm.mailbox import Mailbox, late_error, left_reason, lost_error
from bagua_kernels.comm.work import Pending, Work
from bagua_kernels.errors import CommunicationError, MismatchError

_POISON = 255  # as bytes of a float: NaN

Key = tuple[int, int, int]  # from, to, number


@dataclass
class PostOffice:
    """What the mailboxes of some ranks share; the lock of their `LocalWorld` protects it.

    Attributes:
        ranks: the members as numbers of the world.
        tensors: what was sent and not received. A tensor is the sender's own until the sender's `wait` returns.
        letters: for each member the letters that it has not taken, in the order in which they arrive. Each has the time of
            its arrival, by the world's clock, and its sender.
        gone: the members that left, with the reasons.
        dropped: for each member the ranks that it dropped.
        below: for each member the lowest number that it still uses.
    """

    ranks: tuple[int, ...]
    tensors: dict[Key, torch.Tensor] = field(default_factory=dict)
    letters: list[list[tuple[float, int, bytes]]] = field(init=False)
    gone: dict[int, str] = field(default_factory=dict)
    dropped: list[set[int]] = field(init=False)
    below: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.letters = [[] for _ in self.ranks]
        self.dropped = [set() for _ in self.ranks]
        self.below = [0 for _ in self.ranks]


class LocalMailbox(Mailbox):
    """One rank's mailbox in a `LocalWorld`, for tests.

    It is as late as `Work` allows, so that memory that is used again too early shows. Outputs are poisoned when an exchange
    starts, and written in `wait`. An input is read when its receiver waits, at the latest when the sender's `wait` returns.

    A rank that its world has lost (`LocalWorld.lose`) cannot use its mailbox any more; the others can, among themselves.

    Args:
        communicator: of the same ranks; every rank passes its own.
    """

    def __init__(self, communicator: LocalCommunicator) -> None:
        world, key, ranks = communicator.shared_by_ranks("mailbox")
        self.rank, self.size = communicator.rank, communicator.size
        self.device, self.timeout = communicator.device, communicator.timeout
        self._world: LocalWorld = world
        self._office = world.shared(key, lambda: PostOffice(ranks))
        self.clock = world.clock
        self._woken = False
        self._sent = 0

    @property
    def bytes_sent(self) -> int:
        """See `Mailbox.bytes_sent`."""
        return self._sent

    def wake(self) -> None:
        """See `Mailbox.wake`."""
        with self._world.changed:
            self._woken = True
            self._world.changed.notify_all()

    def lost(self) -> dict[int, str]:
        """See `Mailbox.lost`."""
        with self._world.changed:
            reasons = {peer: self._why_lost(peer) for peer in range(self.size) if peer != self.rank}
        return {peer: reason for peer, reason in reasons.items() if reason}

    def leave(self, reason: str = "", culprits: Collection[int] = ()) -> None:
        """See `Mailbox.leave`."""
        with self._world.changed:
            self._office.gone.setdefault(self.rank, left_reason(reason, culprits))
            for key in [key for key in self._office.tensors if key[0] == self.rank]:
                self._settle(key)
            self._free(frozenset(range(self.size)), 0)
            self._world.changed.notify_all()

    def _unusable(self) -> str:
        with self._world.changed:
            lost = self._world.lost.get(self._office.ranks[self.rank], "")
            return self._office.gone.get(self.rank, "") or (lost and f"this rank was lost: {lost}")

    def _why_lost(self, peer: int) -> str:
        """Returns why a rank is lost, or an empty text; the caller holds the lock."""
        office = self._office
        if peer in office.dropped[self.rank]:
            return "it was dropped"
        if self.rank in office.dropped[peer]:
            return left_reason("it dropped this rank")
        if self._until_letters({peer}) > 0:
            return ""
        return office.gone.get(peer, "") or self._world.lost.get(office.ranks[peer], "")

    def _until_letters(self, senders: Collection[int]) -> float:
        """Returns the seconds until all letters of some ranks have arrived; the caller holds the lock."""
        arrivals = [time for time, src, _ in self._office.letters[self.rank] if src in senders]
        return max(0.0, max(arrivals, default=0.0) - self._world.clock.now())

    def _exchange(self, outputs: dict[int, torch.Tensor], inputs: dict[int, torch.Tensor], number: int) -> Work:
        work = LocalMailboxWork(self, outputs, inputs, number)
        with self._world.changed:
            office = self._office
            if number < office.below[self.rank]:
                raise ValueError(f"expected a number from {office.below[self.rank]} on, which `drop` set, got {number}")
            for dst in inputs:
                if (self.rank, dst, number) in office.tensors:
                    raise ValueError(f"expected a new number for rank {dst}, got {number}, which is under way")
            for output in outputs.values():
                _bytes(output).fill_(_POISON)
            # Receivers copy the inputs on streams of their own.
            synchronize(self.device)
            for dst, tensor in inputs.items():
                if not self._why_lost(dst) and number >= office.below[dst]:
                    office.tensors[self.rank, dst, number] = tensor
                    self._sent += tensor.nbytes
            work.refused = {dst for dst in inputs if self._why_lost(dst)}
            self._world.changed.notify_all()
        return work

    def _post(self, dst: int, letter: bytes) -> None:
        with self._world.changed:
            if self._why_lost(dst):
                return
            letters, clock = self._office.letters[dst], self._world.clock
            earlier = max((time for time, src, _ in letters if src == self.rank), default=0.0)
            bisect.insort(letters, (max(earlier, clock.now() + clock.latency()), self.rank, letter), key=_time)
            self._sent += len(letter)
            self._world.changed.notify_all()

    def _take(self, timeout: float, known: Mapping[int, str] | None) -> tuple[int, bytes] | None:
        clock, letters = self._world.clock, self._office.letters[self.rank]
        with self._world.changed:
            deadline = clock.now() + timeout
            while not letters or letters[0][0] > clock.now():
                self._check_usable()
                left = deadline - clock.now()
                if self._woken or left <= 0 or (known is not None and self.lost() != known):
                    self._woken = False
                    return None
                self._world.changed.wait(min(left, letters[0][0] - clock.now()) if letters else left)
            _, src, letter = letters.pop(0)
            return src, letter

    def _drop(self, ranks: frozenset[int], below: int) -> None:
        with self._world.changed:
            office = self._office
            office.dropped[self.rank] |= ranks
            office.below[self.rank] = max(below, office.below[self.rank])
            self._free(ranks, below)
            self._world.changed.notify_all()

    def _free(self, ranks: frozenset[int], below: int) -> None:
        office, letters = self._office, self._office.letters[self.rank]
        for key in [key for key in office.tensors if key[1] == self.rank and (key[0] in ranks or key[2] < below)]:
            del office.tensors[key]
        letters[:] = [letter for letter in letters if letter[1] not in ranks]

    def _settle(self, key: Key) -> None:
        """Copies a tensor that its sender may change from now on, if it has not been received; the caller holds the lock."""
        if key in self._office.tensors:
            self._office.tensors[key] = self._office.tensors[key].clone()
            synchronize(self.device)


class LocalMailboxWork(Pending):
    """One rank's part of an exchange.

    Attributes:
        refused: destinations that were lost when it started.
    """

    def __init__(
        self, mailbox: LocalMailbox, outputs: dict[int, torch.Tensor], inputs: dict[int, torch.Tensor], number: int
    ) -> None:
        world = mailbox._world
        super().__init__(world.clock.condition(), world.clock.now)
        self.refused: set[int] = set()
        self._mailbox = mailbox
        self._outputs = outputs
        self._sent = [(mailbox.rank, dst, number) for dst in inputs]
        self._received = {(src, mailbox.rank, number): output for src, output in outputs.items()}
        self._number = number
        self._name = f"exchange #{number}"

    def is_completed(self) -> bool:
        """Returns True if `wait` would return, or raise, at once."""
        with self._mailbox._world.changed:
            try:
                return self._done or self._error is not None or not self._missing()
            except CommunicationError:
                return True

    def _complete(self) -> None:
        mailbox, world = self._mailbox, self._mailbox._world
        deadline = (world.clock.now() if self._started is None else self._started) + mailbox.timeout
        with world.changed:
            try:
                while missing := self._missing():
                    left = deadline - world.clock.now()
                    if left <= 0:
                        raise late_error(self._name, mailbox.timeout, missing, mailbox.lost())
                    # A partner that has gone is lost once its letters have arrived.
                    letters = mailbox._until_letters(missing)
                    world.changed.wait(min(left, letters) if letters else left)
            except CommunicationError:
                self._settle()
                raise

    def _conclude(self) -> None:
        with self._mailbox._world.changed:
            tensors = self._mailbox._office.tensors
            for key, output in self._received.items():
                if key not in tensors:  # another thread of this rank has left meanwhile
                    raise CommunicationError(f"{self._name} was given up: {self._mailbox._unusable()}")
                sent = tensors[key]
                if (sent.dtype, sent.numel()) != (output.dtype, output.numel()):
                    self._settle()
                    raise MismatchError(
                        f"in {self._name} rank {key[0]} sent {sent.numel()} elements of {sent.dtype} where this rank "
                        f"expected {output.numel()} of {output.dtype}: make both ends use the same size and dtype",
                        sorted(key[:2]),
                    )
            for key, output in self._received.items():
                output.view(-1).copy_(tensors[key].view(-1))
            # The sender may change or free the memory once its tensor is off the list.
            synchronize(self._mailbox.device)
            for key in self._received:
                del tensors[key]
            self._settle()

    def _missing(self) -> list[int]:
        """Returns the ranks whose messages are not here; raises if they never will be. The caller holds the lock."""
        mailbox = self._mailbox
        if reason := mailbox._unusable():
            raise CommunicationError(f"{self._name} was given up: {reason}")
        if self._number < mailbox._office.below[mailbox.rank]:
            raise CommunicationError(f"{self._name} was given up: `drop` named its number")
        tensors = mailbox._office.tensors
        missing = [key[0] for key in self._received if key not in tensors]
        unsent = [key[1] for key in self._sent if key in tensors]
        lost, dropped = mailbox.lost(), mailbox._office.dropped[mailbox.rank]
        if partners := [peer for peer in {*missing, *unsent, *self.refused} if peer in lost]:
            named = {peer: why for peer, why in lost.items() if peer in partners or peer not in dropped}
            raise lost_error(self._name, partners, named)
        return missing

    def _settle(self) -> None:
        for key in self._sent:
            self._mailbox._settle(key)


def _time(letter: tuple[float, int, bytes]) -> float:
    return letter[0]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A tensor of one element is contiguous whatever its stride, but only a stride of 1 can be viewed as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
