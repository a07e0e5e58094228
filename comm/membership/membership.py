"""The living ranks of a job, and what happens when that changes."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from bagua_kernels.comm.backends.sockets.communicator import StripedCommunicator
from bagua_kernels.comm.communicator import Communicator, gather_json
from bagua_kernels.comm.joining.address import own_address
from bagua_kernels.comm.joining.gate import listen
from bagua_kernels.comm.joining.installed import Installed
from bagua_kernels.comm.joining.secret import Secret
from bagua_kernels.comm.mailbox.courier import weakly
from bagua_kernels.comm.membership.agreement import EVIDENCE, NOTICE, SILENCE, Agreement, Census, Letter, Quota
from bagua_kernels.comm.membership.bare import Bare
from bagua_kernels.comm.membership.door import Door, meet
from bagua_kernels.comm.membership.draft import Drafted, Drafting, lend
from bagua_kernels.comm.membership.line import MemberLine
from bagua_kernels.comm.membership.notice import Notice
from bagua_kernels.comm.membership.pulse import Address, Pulse, has_ended
from bagua_kernels.comm.membership.transports import EpochTransport, LineTransport
from bagua_kernels.comm.membership.votes import MOST, Votes
from bagua_kernels.errors import CommunicationError, MembershipError, MismatchError

_LETTER, _NOTICE, _FAILED, _WANTS, _REVOKED, _VOTE = 64, 65, 66, 67, 68, 69  # kinds of letters
_GLANCE = 0.25  # seconds between two looks at who is silent, or a sixteenth of the timeout
_GLANCES = 16
_PAUSED = 1.0  # seconds between two looks after which this process was stopped, and for which it reads then
_IN_VAIN = 3  # epochs in a row of the same members, in which no round was finished
_NEW_CONNECTION = 1.0  # seconds for a process to answer whose connections broke, or a quarter of the timeout
_LEFT = "it left"  # how reasons begin of ranks that have ended in order
_MEETING = 10.0  # seconds in which all members of an epoch with a new one connect, or the timeout
# What a system reports of a connection when it has waited in vain: the other host may be alive, behind a network that is cut.
_UNREACHABLE = tuple(
    os.strerror(each) for each in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
)

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Follower(Protocol):
    """What exchanges something among the members, such as an algorithm, and goes on in another epoch."""

    def report(self) -> Any:
        """Returns what the others are to know, made of what JSON has, when an epoch ends."""

    def interrupt(self, reason: str) -> None:
        """Ends the waits for other ranks, on any thread; these then raise `CommunicationError`."""

    def enter(self, communicator: Communicator, reports: Mapping[int, Any]) -> None:
        """Goes on among the members of an epoch; collective, on all of them in the order in which followers were added.

        Args:
            communicator: of these, which nothing else uses meanwhile.
            reports: what they have reported, by rank of that communicator. New members have reported nothing: they come to
                the place where followers of theirs are added.
        """


class Membership:
    """The living ranks of a job, as a list with a number, its epoch.

    1. A rank is lost if its connections broke, if it has left, or if nothing comes from it for the timeout. Where connections
       broke, a new one shows if its process has ended: else this counts as silence, for it may be training on.
    2. All members that are left come to the end of the epoch, as soon as an exchange of theirs fails, or begins. Where a process
       wants to join that is between two rounds.
    3. They agree on the members of the next one, see `Agreement`. This needs no store and no server.
    4. They go on with a communicator of these, over the connections that they have.
    5. A process that asks any member at its `Door` makes an epoch end, too. All members of the next one connect anew.

    `revoke`, `agree`, `shrink` and `grow` are for programs that handle losses themselves. Their names are those of MPI's User
    Level Failure Mitigation (ULFM). An algorithm with `on_failure="heal"` needs no call of them.

    A loss by silence is only accepted by more than half of the members: behind a cut network others may be training on.

    Attributes:
        communicator: of the members of this epoch, in the order of their names.
        name: of this member, which it keeps: its rank in the first epoch, or the number that it got when it joined.
        epoch: the number of this one, from 1.
        ranks: the names of the members.
        leaving: the names of members that are about to leave, for which this epoch has begun: they hand over what they have.
        notice: of this process, that it is to leave. Algorithms that heal do so at the end of their round.
        behind: the names of members that joined before this epoch, and have not yet exactly what the others have.
        has_joined: True if this member has joined a job that ran.
        draft: what it began with, of which the rest follows while it takes part; None if it gets everything at once.
        losses: how many ranks have been lost while this one was a member.
        joins: how many have joined meanwhile.
        healing_seconds: time from errors of lost ranks to the epochs that followed.
    """

    communicator: Communicator
    leaving: tuple[int, ...]
    behind: tuple[int, ...]
    draft: Drafting | None

    def __init__(
        self,
        anchor: Communicator,
        terms: Quota | None = None,
        *,
        secret: Secret | None = None,
        transport: EpochTransport | None = None,
    ) -> None:
        """Begins epoch 1; collective.

        Args:
            anchor: a communicator of all ranks, for this object alone from now on. Letters go over its connections.
            terms: what the members of an epoch have to be; those of `Quota()` if None.
            secret: of the job, which processes need that join it; None where none may.
            transport: what makes the communicators of epochs; if None, they are split from the anchor.

        Raises:
            CommunicationError: or one of its kinds: a rank was lost before the first epoch had a communicator.
        """
        names = tuple(range(anchor.size))
        self._transport = transport or LineTransport()
        agreement = Agreement(anchor.rank, names, weakly(self._post), terms or Quota())
        self._begin(anchor, anchor.rank, names, agreement, secret)

    @classmethod
    def joined(
        cls,
        anchor: Communicator,
        name: int,
        census: Census,
        next_name: int,
        terms: Quota,
        secret: Secret,
        draft: Drafting | None = None,
        transport: EpochTransport | None = None,
    ) -> Membership:
        """Begins an epoch as a new member; collective, with the other members' `change`.

        Args:
            anchor: a communicator of all members.
            name: of this one.
            census: of the epoch.
            next_name: see `Agreement`.
            terms: as for the constructor.
            secret: as for the constructor.
            draft: what it begins with; None for nothing.
            transport: as for the constructor; of the kind that the other members have.
        """
        made = cls.__new__(cls)
        made._transport = transport or LineTransport()
        agreement = Agreement(name, census.members, weakly(made._post), terms, census.epoch, next_name)
        made._begin(anchor, name, census.members, agreement, secret)
        made._entering = True
        made.has_joined, made.draft = True, draft
        try:
            made._take_census(census)
            made._meet()
            if not made.is_arriving:
                made._end_entering()
        except BaseException:
            made._end("it could not join")
            raise
        return made

    @property
    def newcomers(self) -> tuple[int, ...]:
        """The names of members to which the follower that enters, or at a new member the next one, is still to be given."""
        at = len(self._followers) if self.is_arriving and self._at < 0 else self._at
        return tuple(name for name in self.ranks if self._counts.get(name, self._expected) <= at)

    @property
    def is_arriving(self) -> bool:
        """True at a new member until it has all followers that the others have: these wait for each of them."""
        return len(self._followers) < self._expected

    def _begin(
        self,
        anchor: Communicator,
        name: int,
        names: tuple[int, ...],
        agreement: Agreement,
        secret: Secret | None,
    ) -> None:
        self.name, self._agreement, self._secret = name, agreement, secret
        self.epoch, self.ranks = agreement.epoch, names
        self.losses = self.joins = self._in_vain = 0
        self.healing_seconds, self._failed = 0.0, ""
        self._lock = threading.RLock()  # of what couriers of several lines do
        self._followers: list[weakref.ref[Follower]] = []
        self._arriving: weakref.ref[Follower] | None = None
        self._callbacks: list[Callable[[Membership], object]] = []
        self._coming: tuple[int, Any] | None = None
        self._calls = 0  # under way, in which no process joins
        self._entering = False  # True while members get what they need
        self._wishes: list[Any] = []  # of processes that ask meanwhile
        self._early: list[tuple[int, int, bytes]] = []  # to members with which this one does not connect yet
        self._is_changing = self._closing = self._closed = False
        self._watched = self._awake_since = -math.inf
        self.has_joined, self._source = False, names[0]
        # The number of followers, that of members which have fewer as they are new, and the place of the one that enters.
        self._expected, self._counts, self._at = 0, dict[int, int](), -1
        self.behind, self.draft = (), None
        self.notice, self._parting, self.leaving = Notice(), "", ()
        self._door: Door | None = None
        self._listener: socket.socket | None = None
        self._pulse: Pulse | None = None
        self._pulses: dict[int, Address] = {}  # of members, by name
        # By line and name: what `has_ended` returned; None until it has.
        self._ended: dict[tuple[int, int], tuple[bool, str] | None] = {}
        self._revoked: tuple[int, str] = (0, "")  # the newest epoch that a member has revoked, and why
        self._votes = self._new_votes()
        self._lines = [MemberLine(anchor, names, agreement.epoch)]
        self._start(self._lines[0])
        try:
            if isinstance(anchor, StripedCommunicator):
                self._pulse = Pulse(self._host())
                # A new member learns of others when all have met.
                if self.epoch == 1:
                    self._share_pulses()
            self._communicate(names)
        except BaseException:
            self._end("it could not begin")
            raise
        if self.has_changed:
            self._interrupt(f"epoch {self.epoch} ends as it begins")

    def _start(self, line: MemberLine) -> None:
        handlers = [
            (_LETTER, weakly(self._hear)),
            (_NOTICE, weakly(self._hear_notice)),
            (_FAILED, weakly(self._hear_failure)),
            (_WANTS, weakly(self._hear_wish)),
            (_REVOKED, weakly(self._hear_revocation)),
            (_VOTE, weakly(self._hear_vote)),
        ]
        line.courier.every(min(_GLANCE, line.mailbox.timeout / _GLANCES), weakly(self._watch))
        line.begin(handlers, weakly(self._look), self)

    @property
    def _line(self) -> MemberLine:
        """The newest connections."""
        return self._lines[-1]

    @property
    def has_changed(self) -> bool:
        """True if this epoch is to end."""
        return self._is_ending or self._agreement.is_changing

    @property
    def _is_ending(self) -> bool:
        """True if an exchange that begins now would fail."""
        agreement = self._agreement
        is_revoked = self._revoked[0] == self.epoch
        return bool(agreement.suspicions) or agreement.is_ending or bool(agreement.refusal) or is_revoked

    @property
    def is_wanted(self) -> bool:
        """True if a process wants to join: `change` is to be called between two rounds, of which none is lost then."""
        return bool(self._agreement.wanting) and self._agreement.epoch == self.epoch and not self._closing

    @property
    def address(self) -> tuple[str, int] | None:
        """Where processes may ask this member to let them join; None where none may."""
        return None if self._door is None else self._door.address

    def listen(self, host: str, port: int) -> None:
        """Lets processes join from now on, which ask this member at an address.

        Args:
            host: the address of this host; empty for that at which it listens for the other ranks.
            port: the first that is tried; 0 for any.

        Raises:
            ValueError: the job has no secret.
            CommunicationError: no port is free.
        """
        if self._secret is None:
            raise ValueError(
                "a job that others may join needs a secret, so that no stranger does: set BAGUA_KERNELS_SECRET to the same "
                "text on all ranks"
            )
        self._door = Door(host or self._host(), port, self._secret, weakly(self._admit))

    @contextlib.contextmanager
    def giving(self, communicator: Communicator) -> Iterator[Communicator | None]:
        """In the block one member gives the new ones of this epoch what they need; collective.

        That is the first one of those that have come furthest: it may have taken a step that others have still to take, whose
        gradients all of them have.

        Args:
            communicator: of all members.

        Yields:
            A communicator of those, in which the giving one has rank 0. None at other members, and where nobody is new.
        """
        new = [rank for rank, name in enumerate(self.ranks) if name in self.newcomers]
        source = self.ranks.index(self._source)
        among = sorted({source, *new})
        if not new or communicator.rank not in among:
            yield None
            return
        with communicator.split(among) or contextlib.nullcontext() as pair:
            yield pair

    def giving_on(self, communicator: Communicator) -> tuple[Communicator, int] | None:
        """Returns a communicator of the giving member, the new ones and those that are `behind`; collective.

        Args:
            communicator: of all members.

        Returns:
            With the rank of the giving one in it. None at other members, and where there are none of these.
        """
        source = self.ranks.index(self._source)
        others = [rank for rank, name in enumerate(self.ranks) if name in self.newcomers or name in self.behind]
        if not others or communicator.rank not in (source, *others):
            return None
        among = sorted({source, *others})
        made = communicator.split(among)
        return None if made is None else (made, among.index(source))

    def arrive(self, call: Callable[[Communicator], T], follower: Follower | None = None) -> T:
        """Returns what a collective call of a new member returns, which begins again where ranks are lost meanwhile.

        Args:
            call: is given the communicator of all members that are left.
            follower: whose waits end, too, where that is needed; it follows afterwards.

        Raises:
            CommunicationError: as `change`.
        """
        while True:
            self._arriving = None if follower is None else weakref.ref(follower)
            try:
                if self._is_ending:
                    raise CommunicationError(f"epoch {self.epoch} ends")
                return call(self.communicator)
            except CommunicationError as error:
                self._arriving = None
                self.change(error)
            finally:
                self._arriving = None

    @contextlib.contextmanager
    def admitting_none(self) -> Iterator[None]:
        """In the block no process joins, where ranks change: it would not be at the call that all members repeat."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    def on_change(self, callback: Callable[[Membership], object]) -> None:
        """Calls a function with this object whenever an epoch begins, on the thread that trains."""
        self._callbacks.append(callback)

    def add(self, follower: Follower) -> None:
        """Lets something follow the epochs as long as it exists; on all ranks in one order."""
        was_arriving = self.is_arriving
        self._followers.append(weakref.ref(follower))
        if was_arriving and not self.is_arriving:
            self._end_entering()

    def remove(self, follower: Follower) -> None:
        """Lets it follow no more; on all ranks in one order."""
        self._followers = [each for each in self._followers if each() not in (None, follower)]

    def wait_for(self, count: int) -> None:
        """Waits until the job has a number of members; all members call it between exchanges.

        Raises:
            CommunicationError: as `change`.
        """
        while len(self.ranks) < count:
            self._line.courier.wait_for(lambda: self.has_changed or bool(self._failed))
            self.change(CommunicationError(self._failed or f"epoch {self.epoch} ends"))

    def grow(self, count: int) -> Communicator:
        """Returns the communicator of the epoch once the job has so many members; as `wait_for`.

        Raises:
            CommunicationError: as `change`.
        """
        self.wait_for(count)
        return self.communicator

    def shrink(self) -> Communicator:
        """Begins the next epoch among the members that are left, and returns its communicator; collective.

        All members call it, when an operation of theirs has failed, or where none is under way.

        Raises:
            MembershipError: as `change`.
            CommunicationError: as `change`.
        """
        # The program asked for this epoch, so that none was in vain.
        self.finished_round()
        self.change(CommunicationError(f"epoch {self.epoch} ends by shrink()"))
        return self.communicator

    def revoke(self, reason: str = "it was revoked") -> None:
        """Ends this epoch's communicator and all that were split from it, on all members, once one has seen a failure.

        What is under way on these raises `CommunicationError`, and so does what begins later. Members then call `shrink`. It
        returns at once, from any thread. Calling it again in an epoch does nothing.

        Args:
            reason: text of the errors, on all members.
        """
        about = {"epoch": self.epoch, "reason": f"rank {self.name} revoked it: {reason}"}
        self._hear_revocation(self.name, json.dumps(about).encode())

    def agree(self, value: int) -> int:
        """Returns the bitwise AND of the numbers that the members give, the same at all that are left; collective.

        It needs no usable communicator, so that it may follow a failure or `revoke`. A member that is lost meanwhile counts on
        all members or on none. A member that does not call it within the timeout is left out.

        Args:
            value: True, False, or a number from 0 to 2^63 - 1, each bit of which is a flag.

        Raises:
            ValueError: the number is another one.
            MembershipError: this rank was left out, or fewer ranks are left than have to be.
            CommunicationError: the job has ended, or is about to end.
        """
        if not isinstance(value, int) or not 0 <= value <= MOST:
            raise ValueError(
                f"agree expects True, False or an int from 0 to 2^63 - 1, got {value!r}: give flags as bits"
            )
        if self._closing:
            raise CommunicationError("agree was called after the end of the job: call it before shutdown() or leave()")
        with self._lock:
            votes, agreement = self._votes, self._agreement
            vote = votes.give(int(value))
        courier = self._line.courier
        courier.wake()
        courier.wait_for(
            lambda: votes.result(vote) is not None or bool(self._failed or votes.refusal or agreement.refusal)
        )
        if (result := votes.result(vote)) is not None:
            return result
        if self._failed:
            raise CommunicationError(self._failed)
        raise MembershipError(
            f"rank {self.name} cannot agree in epoch {self.epoch}: {votes.refusal or agreement.refusal}; start it again from a "
            "checkpoint"
        )

    def leave(self, reason: str) -> None:
        """Leaves the job with notice, between two exchanges: the others go on without an error.

        1. An epoch begins with all members, in which this one hands over what only it has, such as residuals.
        2. It leaves. What it has then is used no more.

        Raises:
            MembershipError: as `change`.
        """
        if self._living_followers() and not self._closing:
            self._parting = reason
            self.change(CommunicationError(reason))
        self._tell(_NOTICE, reason.encode())
        self._end(reason)

    def change(self, error: BaseException) -> None:
        """Comes to the end of this epoch, and begins the next with all members that are left; collective.

        Args:
            error: of the exchange that has failed on this rank.

        Raises:
            MembershipError: this rank may not go on: it was left out, or fewer ranks are left than have to be.
            BaseException: `error`, if it means that ranks disagree and not that one is lost, or if nothing changes.
        """
        while True:
            if isinstance(error, MismatchError) or not isinstance(error, CommunicationError) or self._closing:
                raise error
            before, began = self.ranks, self._line.mailbox.clock.now()
            census = self._agree(error)
            self._in_vain = self._in_vain + 1 if census.members == before else 0
            if self._in_vain > _IN_VAIN:
                raise error
            try:
                self._enter(census)
                if (self.leaving or self._counts) and not self.is_arriving:
                    # Until new members have all that they need, and others what one that leaves handed over, another change
                    # would disturb them.
                    self.communicator.barrier_on_host()
            except MembershipError:
                raise
            except CommunicationError as second:
                error = second
                continue
            finally:
                if not self.is_arriving:
                    self._take_wishes()
            seconds = self._line.mailbox.clock.now() - began
            self.healing_seconds += seconds
            lost = "; ".join(f"rank {rank} ({reason})" for rank, reason in census.lost.items())
            _log.warning(
                "epoch %d begins after %.3f s: ranks %s go on; lost: %s; new: %s",
                census.epoch,
                seconds,
                ", ".join(map(str, census.members)),
                lost or "none",
                ", ".join(map(str, census.joined)) or "none",
            )
            for callback in self._callbacks:
                callback(self)
            return

    def finished_round(self) -> None:
        """Notes that a round of exchanges was finished in this epoch."""
        self._in_vain = 0

    def prepare_close(self) -> None:
        """Takes ranks that leave from now on as ranks that have finished; on all ranks before they close."""
        self._closing = True

    def close(self, failure: str = "") -> None:
        """Leaves the job at its end.

        Args:
            failure: the error because of which this rank ends, which ends the job on all ranks; empty if it has finished.
        """
        if failure and not self._agreement.refusal:
            self._tell(_FAILED, failure.encode()[:1000])
        self._end(failure or "it has finished")

    def _end(self, reason: str) -> None:
        if self._closed:
            return
        self._closing = self._closed = True
        if self._door is not None:
            self._door.close()
        if self._pulse is not None:
            self._pulse.close()
        self._interrupt(reason)
        for line in self._lines:
            line.end(reason)
        self._stop_listening()
        self.notice.close()

    def _agree(self, error: BaseException) -> Census:
        report = {
            "followers": [each.report() for each in self._living_followers()],
            # Where none is known nobody is admitted.
            "address": None if self._calls else self._listen_for_members(),
            "lines": [line.epoch for line in self._lines],
            "leaves": self._parting,
            "behind": any(getattr(each, "is_behind", False) for each in self._living_followers()),
            "passes": sum(getattr(each, "passes", 0) for each in self._living_followers()),
        }
        self._coming = self.epoch, report
        line, agreement = self._line, self._agreement
        line.courier.wake()
        line.courier.wait_for(lambda: bool(self._failed or agreement.refusal) or agreement.epoch > self.epoch)
        if self._failed:
            raise CommunicationError(self._failed) from error
        if agreement.epoch > self.epoch:
            return agreement.ended[self.epoch]
        raise MembershipError(
            f"rank {self.name} cannot go on after epoch {self.epoch}: {agreement.refusal}; start it again from a checkpoint"
        ) from error

    def _listen_for_members(self) -> tuple[str, int] | None:
        """Listens, where processes may join, for the members of the next epoch; returns the address."""
        self._stop_listening()
        # Others may have heard of one that wants to, and this rank not yet.
        if self._secret is None:
            return None
        self._listener = listen(self._host(), 4 * len(self.ranks) + 64)
        found: tuple[str, int] = self._listener.getsockname()[:2]
        return found

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _host(self) -> str:
        return getattr(self._line.anchor, "_host", "") or own_address()

    def _end_entering(self) -> None:
        """Lets the others know, as a new member, that this one has all that it needs."""
        try:
            self.communicator.barrier_on_host()
        except CommunicationError as error:
            _log.info("epoch %d ends as it begins: %s", self.epoch, error)  # the next exchange finds the same
        finally:
            self._take_wishes()

    def _take_wishes(self) -> None:
        """Lets this epoch end for processes that have asked while it began."""
        with self._lock:
            self._entering = False
            wishes, self._wishes = self._wishes, []
            for about in wishes:
                self._agreement.invite(about["key"], about)
        self._follow()

    def _enter(self, census: Census) -> None:
        with self._lock:
            self._entering = True
            self._wishes += self._agreement.wanting.values()
            self._agreement.wanting = {}
        self.communicator.abort_family(f"epoch {self.epoch} has ended")
        old = [name for name in census.members if name not in census.joined]
        self._keep_common([census.reports[name]["lines"] for name in old])
        # First: if this epoch cannot begin, it is the one that ends next.
        self.epoch, self.ranks = census.epoch, census.members
        self._take_census(census)
        self.leaving = tuple(name for name in old if census.reports[name]["leaves"])
        self.losses += len(census.lost)
        self.joins += len(census.joined)
        if census.joined:
            self._connect(census)
        self._stop_listening()
        self._communicate(census.members)
        # From here on it is interrupted; before, another one was.
        self._check_beginning()
        if census.joined:
            self._meet()
        told = [census.reports[name]["followers"] for name in old]
        try:
            for index, each in enumerate(self._living_followers()):
                self._at = index
                pairs = [(name, all_of) for name, all_of in zip(old, told, strict=True) if len(all_of) > index]
                each.enter(self.communicator, {census.members.index(name): all_of[index] for name, all_of in pairs})
        finally:
            self._at = -1

    def _take_census(self, census: Census) -> None:
        """Learns who has what of what is followed.

        Raises:
            MembershipError: nobody has all of it.
        """
        counts = {name: len(census.reports[name]["followers"]) for name in census.members if name not in census.joined}
        self._expected = max(counts.values())
        fewer = {name: counts.get(name, 0) for name in census.members}
        self._counts = {name: count for name, count in fewer.items() if count < self._expected or name in census.joined}
        self.behind, self._source = _behind(census), _furthest(census)

    def _connect(self, census: Census) -> None:
        """Connects the members of an epoch, of which some are new.

        Raises:
            CommunicationError: one of these did not come, which counts as lost.
        """
        assert self._secret is not None
        assert self._listener is not None
        timeout = self._line.mailbox.timeout
        if self._door is not None:
            told = {
                "census": census.to_json(),
                "next_name": self._agreement.next_name,
                "terms": self._agreement.terms.to_json(),
                "timeout": timeout,
            }
            for name, each in census.joined.items():
                self._door.answer(each["key"], {**told, "name": name})
        try:
            anchor = connected(self.name, census, self._listener, self._secret, timeout, lambda: self._is_ending)
            made = MemberLine(anchor, census.members, census.epoch)
        except CommunicationError:
            with self._lock:
                self._early = []
                for name in census.joined:
                    self._agreement.suspect(name, EVIDENCE, "it did not connect")
            raise
        finally:
            self._stop_listening()
        self._start(made)
        with self._lock:
            self._lines.append(made)
            early, self._early = self._early, []
            for letter in early:
                self._send(*letter)

    def _keep_common(self, lines: list[list[int]]) -> None:
        """Drops connections that some member lacks, since it could not connect when others could.

        Args:
            lines: of each member, the epochs of the connections that it has.
        """
        common = max(set(lines[0]).intersection(*lines[1:]))
        newer = [line for line in self._lines if line.epoch > common]
        self._lines = [line for line in self._lines if line.epoch <= common]
        for line in newer:
            line.end("some members lack it")

    def _meet(self) -> None:
        """Waits until all members have the newest connections, after which nobody needs others."""
        self._share_pulses()
        older, self._lines = self._lines[:-1], self._lines[-1:]
        for line in older:
            line.end("its members have other connections now")

    def _share_pulses(self) -> None:
        """Learns where other members answer; collective over those of the newest connections."""
        names = self._line.names
        own = None if self._pulse is None else self._pulse.address
        with self._line.communicator(names) as meeting:
            found = gather_json(meeting, own)
        self._pulses = {
            name: (each[0], each[1], each[2]) for name, each in zip(names, found, strict=True) if each is not None
        }

    def _communicate(self, names: tuple[int, ...]) -> None:
        communicator = self._transport.communicator(self._line, names, self._check_beginning)
        communicator.members = self
        self.communicator = communicator

    def _check_beginning(self) -> None:
        """Raises `CommunicationError` if this epoch ends before it has begun."""
        if self._agreement.epoch > self.epoch or self.has_changed or self._failed:
            raise CommunicationError(self._failed or f"epoch {self.epoch} ends as it begins")

    def _renew_votes(self) -> None:
        """Begins with the votes of another epoch, before any letter about them is read."""
        if self._votes.epoch != self._agreement.epoch:
            self._votes = self._new_votes()

    def _new_votes(self) -> Votes:
        agreement = self._agreement
        return Votes(self.name, agreement.members, weakly(self._post_vote), agreement.terms, agreement.epoch)

    def _living_followers(self) -> list[Follower]:
        return [follower for each in self._followers if (follower := each()) is not None]

    def _post(self, name: int, letter: Letter) -> None:
        self._send(name, _LETTER, json.dumps(letter).encode())

    def _post_vote(self, name: int, letter: Letter) -> None:
        self._send(name, _VOTE, json.dumps(letter).encode())

    def _send(self, name: int, kind: int, body: bytes) -> None:
        """Sends a letter by the newest connections that lead there; to a new member as soon as there are any."""
        with self._lock:
            for line in reversed(self._lines):
                if line.has(name):
                    if not line.mailbox._unusable():
                        line.courier.post(line.rank_of(name), kind, body)
                    return
            self._early.append((name, kind, body))

    def _tell(self, kind: int, body: bytes) -> None:
        if not self._closed:
            for name in self.ranks:
                if name != self.name:
                    self._send(name, kind, body)

    def _hear(self, sender: int, body: bytes) -> None:
        with self._lock:
            self._agreement.hear(sender, json.loads(body))
            self._renew_votes()
        self._follow()

    def _hear_notice(self, sender: int, body: bytes) -> None:
        with self._lock:
            self._agreement.suspect(sender, NOTICE, body.decode())
        self._follow()

    def _hear_failure(self, sender: int, body: bytes) -> None:
        # One that was left out ends with an error that concerns nobody else.
        if sender not in self._agreement.members:
            return
        self._failed = f"rank {sender} has ended with an error, which ends the job: {body.decode(errors='replace')}"
        self._interrupt(self._failed)

    def _hear_vote(self, sender: int, body: bytes) -> None:
        with self._lock:
            self._votes.hear(sender, json.loads(body))

    def _hear_revocation(self, sender: int, body: bytes) -> None:
        about = json.loads(body)
        with self._lock:
            if about["epoch"] <= self._revoked[0]:
                return
            self._revoked = about["epoch"], about["reason"]
        # Each member sends it on: the one that began it may be lost before all others have it.
        with contextlib.suppress(CommunicationError):  # this rank is about to end
            self._tell(_REVOKED, body)
        # Read first: once another epoch has begun, there is a communicator that must go on.
        communicator = vars(self).get("communicator")
        self._follow()
        if communicator is not None and about["epoch"] == self.epoch:
            communicator.abort_family(f"epoch {self.epoch} ends: {about['reason']}")

    def _hear_wish(self, sender: int, body: bytes) -> None:
        about = json.loads(body)
        with self._lock:
            if self._entering:
                self._wishes.append(about)
            else:
                self._agreement.invite(about["key"], about)
        self._follow()

    def _admit(self, key: str, request: Any) -> None:
        """Reports to all members that a process wants to join; on the thread of the door."""
        own, other = Installed.here(), Installed.parse(request["installed"])
        if own != other:
            assert self._door is not None
            text = f"the job runs {own}, and this process {other}: install the same version"
            self._door.answer(key, {"refused": text})
            return
        if "draft" in request:
            self._lend(key)
            return
        if (tensors := request.get("tensors")) != self._transport.tensors:
            assert self._door is not None
            text = f"the job has tensors on {self._transport.tensors!r}, and this process on {tensors!r}: pass its device to init"
            self._door.answer(key, {"refused": text})
            return
        wish = json.dumps({"key": key, "sponsor": self.name, "address": request["address"]}).encode()
        with contextlib.suppress(CommunicationError):  # this rank is about to end
            self._tell(_WANTS, wish)
            self._hear_wish(self.name, wish)
            self._line.courier.wake()

    def _lend(self, key: str) -> None:
        """Sends a process that is to join what it may begin with, on a thread."""
        assert self._door is not None
        if (sock := self._door.hand_out(key)) is not None:
            found = next((each for each in self._living_followers() if isinstance(each, Drafted)), None)
            threading.Thread(target=lend, args=(sock, found), name="bagua_kernels draft", daemon=True).start()

    def _look(self) -> bool:
        """Looks who is lost, and whether this rank has come to the end of the epoch; on a courier's thread."""
        with self._lock:
            coming, self._coming = self._coming, None
            if coming is not None and coming[0] == self._agreement.epoch:
                self._agreement.report(coming[1])
            line = self._line
            if not self._closing:
                for rank, reason in line.courier.lost.items():
                    self._take_loss(line, line.names[rank], reason)
        self._follow()
        return False

    def _take_loss(self, line: MemberLine, name: int, reason: str) -> None:
        """Suspects a member whose connection broke, once it is known if a new one is answered."""
        address, key = self._pulses.get(name), (line.epoch, name)
        if any(text in reason for text in _UNREACHABLE):
            self._agreement.suspect(name, SILENCE, reason)
        elif address is None or reason.startswith(_LEFT):
            self._agreement.suspect(name, EVIDENCE, reason)
        elif key not in self._ended:
            self._ended[key] = None
            seconds = min(_NEW_CONNECTION, line.mailbox.timeout / 4)
            call = weakly(self._call)
            threading.Thread(target=call, args=(key, address, seconds), name="bagua_kernels call", daemon=True).start()
        elif (found := self._ended[key]) is not None:
            is_certain, what = found
            self._agreement.suspect(name, EVIDENCE if is_certain else SILENCE, f"{reason}; {what}")

    def _call(self, key: tuple[int, int], address: Address, seconds: float) -> None:
        """Finds out if a process lives whose connection broke; on a thread of its own."""
        found = has_ended(address, seconds)
        with self._lock:
            self._ended[key] = found
        self._line.courier.wake()

    def _watch(self) -> None:
        """Looks who is silent, or does not come; on a courier's thread, now and then."""
        line, agreement = self._line, self._agreement
        now, timeout = line.mailbox.clock.now(), line.mailbox.timeout
        if self._closing or threading.current_thread() is not line.courier._thread:
            return
        # A process that was stopped reads what has come meanwhile before it judges others by their silence.
        if not self._watched <= now <= self._watched + _PAUSED:
            self._awake_since = now
        self._watched = now
        if now < self._awake_since + _PAUSED:
            return
        with self._lock:
            others = [line.rank_of(name) for name in agreement.members if name != self.name and line.has(name)]
            for rank in line.courier.silent(others):
                reason = f"nothing came from it for {timeout:g} s"
                agreement.suspect(line.names[rank], SILENCE, reason)
                # It may have refuted an earlier suspicion there.
                self._votes.find_silent(line.names[rank], reason)
            reason = f"it answers, but did not come to the end of the epoch within {timeout:g} s"
            agreement.suspect_late(now, timeout, reason)
            self._votes.watch(now, timeout)
        self._follow()

    def _follow(self) -> None:
        """Ends the waits of the thread that trains, once this epoch is to end."""
        agreement = self._agreement
        with self._lock:
            self._renew_votes()
            self._votes.suspect(agreement.suspicions)
        # Where a process wants to join, exchanges under way end first.
        is_changing = agreement.epoch == self.epoch and self._is_ending
        if is_changing and not self._is_changing:
            suspected = "; ".join(f"rank {rank} ({each.reason})" for rank, each in list(agreement.suspicions.items()))
            revoked = self._revoked[1] if self._revoked[0] == self.epoch else ""
            why = f": {revoked}" if revoked else f": lost: {suspected}" if suspected else ""
            if not self._closing:
                self._interrupt(f"epoch {agreement.epoch} ends{why}")
        self._is_changing = is_changing

    def _interrupt(self, reason: str) -> None:
        # The first epoch has no communicator yet while it begins; its transport looks at what has changed by itself.
        if (communicator := vars(self).get("communicator")) is not None:
            self._transport.interrupt(communicator, reason)
        arriving = None if self._arriving is None else self._arriving()
        for each in [*self._living_followers(), *([] if arriving is None else [arriving])]:
            each.interrupt(reason)


def _behind(census: Census) -> tuple[int, ...]:
    """Returns the names of members that were there before, and have not yet what the others have."""
    return tuple(name for name, told in census.reports.items() if told["behind"] and name in census.members)


def _furthest(census: Census) -> int:
    """Returns the name of the first member among those that have ended most passes, and have the model.

    Raises:
        MembershipError: those that had it are lost.
    """
    behind = _behind(census)
    told = {name: census.reports[name] for name in census.members if name not in census.joined and name not in behind}
    most = max((len(each["followers"]) for each in told.values()), default=0)
    whole = [name for name, each in told.items() if len(each["followers"]) == most]
    if not whole:
        raise MembershipError(
            f"ranks {', '.join(map(str, behind))} have not got the model yet, and those that had it are lost: start again from a "
            "checkpoint"
        )
    return max(whole, key=lambda name: (census.reports[name]["passes"], -name))


def connected(
    name: int,
    census: Census,
    listener: socket.socket,
    secret: Secret,
    timeout: float,
    look: Callable[[], bool] | None = None,
) -> StripedCommunicator:
    """Returns a communicator of the members of an epoch, who connect anew, where they have reported that they listen.

    Args:
        name: of this one.
        census: of the epoch.
        listener: of this one.
        secret: of the job.
        timeout: of operations, in seconds.
        look: see `meet`.

    Raises:
        CommunicationError: some did not come.
    """
    places = [(census.joined.get(each) or census.reports[each])["address"] for each in census.members]
    addresses = [(str(host), int(port)) for host, port in places]
    rank = census.members.index(name)
    # Two epochs of one number, of parts of a job that was cut, have other members.
    key = secret.derive("epoch", str(census.epoch), ",".join(map(str, census.members)), json.dumps(addresses))
    links = meet(rank, addresses, listener, key.derive("mesh"), 1, min(_MEETING, timeout), look)
    base = Bare(rank, len(addresses), timeout, key.derive("communicator"))
    return StripedCommunicator.over(base, links, addresses[rank][0])
