"""Where ranks come together that may have taken different numbers of steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch

from bagua_kernels.algorithms.models.letters import Letters, Written
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.models.writes import checksums, first_difference
from bagua_kernels.errors import MismatchError

_ANY_STEPS = 1 << 63


class Participant(Protocol):
    """The rounds of this rank; see `Rounds`."""

    local: LocalModel
    known: int
    tells: bool

    def skip_step(self) -> None: ...  # noqa: D102
    def before_arrival(self, call: str) -> None: ...  # noqa: D102
    def end_join(self) -> None: ...  # noqa: D102


class CatchUp:
    """Lets ranks that have fewer rounds take part in those of others, until all have come to a call.

    1. A rank announces to all others that it has come to a call, with the rounds that it has begun.
    2. It takes part in each round that another rank has announced, without a step of its own.
    3. When all ranks are there, all have taken part in the same rounds.

    What is written into parameters is compared between ranks, where it has to be the same.
    """

    def __init__(self, rounds: Participant, compares_writes: bool = False) -> None:
        """Begins with ranks that have begun no rounds.

        Args:
            rounds: of this rank.
            compares_writes: True if what is written into parameters has to be the same on all ranks.
        """
        self._rounds, self._compares_writes = rounds, compares_writes
        mailbox = rounds.local.mailbox
        self._letters = Letters(mailbox) if mailbox.size > 1 else None

    def begin(self) -> None:
        """Starts its threads, if it has any."""

    def tell(self) -> None:
        """Announces the round under way to all other ranks."""
        if self._letters is not None:
            self._letters.tell(self._rounds.local.steps + 1, self._rounds.known)

    def tell_written(self) -> None:
        """Announces to all other ranks parameters that were written here, and that are to be equal on all ranks."""
        if self._letters is not None and self._compares_writes:
            self._letters.tell_written(Written(self._rounds.known, tuple(checksums(self._rounds.local.flat))))

    def check_written(self, read: bool = True) -> None:
        """Raises if parameters that are to be equal were written to other values on another rank, or there alone.

        Args:
            read: True to take the letters that have come.

        Raises:
            MismatchError: they were.
        """
        local = self._rounds.local
        if self._letters is None:
            return
        if not self._compares_writes:
            if read:
                self._letters.keep_last()
            return
        found = self._letters.unequal(self._rounds.known, read)
        if found is None:
            return
        own = checksums(local.flat) if found.own is None else found.own.checksums
        name = first_difference(local.flat, own, found.other.checksums)
        here = "not on" if found.own is None else "to other values on"
        if found.own is not None and found.own.rounds != found.other.rounds:
            here = f"after {found.own.rounds} rounds, not {found.other.rounds}, on"
        with local.failing():
            raise MismatchError(
                f"parameters were written on rank {found.rank}, and {here} rank {local.mailbox.rank}; {name!r} is the first that "
                f"differs. {local.title} needs the same on all ranks: write the same at the same step, or call "
                "synchronize() on all ranks after it",
                sorted({found.rank, local.mailbox.rank}),
            )

    def wait_for_round(self) -> None:
        """Called before the results of a round are put in place."""

    def arrive(self, call: str, equal_steps: bool = False) -> None:
        """Takes part in the rounds that other ranks have begun, until all ranks have come to a call.

        Args:
            call: its name.
            equal_steps: True to count all steps that others have taken, and not only those that have a round.
        """
        rounds, local, letters = self._rounds, self._rounds.local, self._letters
        if letters is None:
            return
        local.check_failure()
        rounds.before_arrival(call)
        telling = rounds.tells
        untouched = local.writes is not None and not local.in_step and not local.has_written()
        with local.failing():
            letters.arrive(call, local.steps, rounds.known)
        # Those who are at the call hear of rounds of ranks that train, and of no others.
        rounds.tells, local.is_through = False, True
        try:
            while True:
                with local.failing():
                    known = local.steps if equal_steps else _ANY_STEPS
                    ahead = letters.wait_for_more(known, rounds.known)
                if ahead is not None and local.has_to_keep():
                    # No step has taken what was written, where all that followed were left out: the round needs it.
                    local.accept_written(called=True)
                self.check_written(read=False)
                if ahead is None:
                    break
                steps, most = ahead
                while rounds.known < most or (equal_steps and local.steps < steps):
                    rounds.skip_step()
                    rounds.before_arrival(call)
            letters.leave()
        finally:
            rounds.tells, local.is_through = telling, False
            if untouched and local.writes is not None:
                local.writes.mark()

    def arrived(self, call: str) -> None:
        """Called when all ranks are at a call, and nothing is under way."""

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Lets ranks have different numbers of batches within the block."""
        self._rounds.tells = True
        try:
            yield
            self._rounds.end_join()
        finally:
            self._rounds.tells = False

    def finish(self) -> None:
        """Takes part in the rounds of other ranks until all have come to `close`."""
        self.arrive("close()")

    def mean_of_ranks(self, vector: torch.Tensor) -> bool:
        """Replaces a vector by its mean over the ranks that are left; returns False if all are."""
        return False

    def give_first(self, data: torch.Tensor) -> bool:
        """Replaces bytes by those of the first rank that is left; returns False if all are."""
        return False

    def close(self) -> None:
        """Ends what it has opened; calling it again does nothing."""
